"""Agent and trainer are upgraded apart: one version older and one newer are understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.wire.make_golden import GOLDEN, example
from tests.wire.strategies import MESSAGES, UNIONS, kinds

from everstep.wire.codec import SCHEMA, Decoder, Frames, check_schema, encode
from everstep.wire.errors import SchemaMismatchError
from everstep.wire.messages import Message

UNDERSTOOD = [SCHEMA - 1, SCHEMA]
FRAMES = [path for v in UNDERSTOOD for path in sorted(GOLDEN.glob(f"v{v}/*.json"))]
BY_NAME = {cls.__name__: cls for cls in MESSAGES}


def decoders(cls: type[Message]) -> list[Decoder[Any]]:
    return [Decoder(union) for union in UNIONS.values() if cls in kinds(union)]


@pytest.mark.parametrize("path", FRAMES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_frame_that_was_once_sent_still_means_the_same(path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    (body,) = Frames().feed(bytes.fromhex(golden["frame"]))
    for decoder in decoders(BY_NAME[path.stem]):
        assert_means(decoder.decode(body), golden["value"])


def assert_means(message: Any, value: Any) -> None:
    """Every value that was sent is there; fields that came later have their defaults."""
    if isinstance(message, msgspec.Struct):
        sent = dict(value)
        assert sent.pop("kind", type(message).__name__) == type(message).__name__
        for field in msgspec.structs.fields(message):
            if field.name in sent:
                assert_means(getattr(message, field.name), sent.pop(field.name))
            else:
                assert not field.required
        assert not sent, f"{type(message).__name__} no longer has {sorted(sent)}"
    elif isinstance(message, list | tuple):
        assert len(message) == len(value)
        for one, sent in zip(message, value, strict=True):
            assert_means(one, sent)
    else:
        assert message == value


def test_every_message_has_its_frame() -> None:
    written = {path.stem for path in (GOLDEN / f"v{SCHEMA}").glob("*.json")}
    assert written == BY_NAME.keys(), "run python -m tests.wire.make_golden"


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_field_of_a_newer_version_is_passed_over(cls: type[Message]) -> None:
    newer = msgspec.defstruct(
        cls.__name__,
        [("of_the_future", dict[str, list[int]], msgspec.field(default_factory=dict))],
        bases=(cls,),
        tag=cls.__name__,
        kw_only=True,
    )
    fields = {n: getattr(example(cls), n) for n in cls.__struct_fields__}
    body = encode(newer(**fields, of_the_future={"a": [1, 2]}))
    assert b"of_the_future" in body
    for decoder in decoders(cls):
        assert decoder.decode(body) == example(cls)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_field_that_an_older_version_does_not_send_takes_its_default(cls: type[Message]) -> None:
    fields = msgspec.structs.fields(cls)
    whole = msgspec.to_builtins(example(cls))
    required = {f.name: whole[f.name] for f in fields if f.required}
    body = msgspec.msgpack.encode({"kind": cls.__name__, **required})
    for decoder in decoders(cls):
        message = decoder.decode(body)
        for field in fields:
            if field.default is not msgspec.NODEFAULT:
                assert getattr(message, field.name) == field.default


@pytest.mark.parametrize("theirs", [SCHEMA - 1, SCHEMA, SCHEMA + 1])
def test_one_version_apart_is_accepted(theirs: int) -> None:
    check_schema(theirs, who="the agent")


@pytest.mark.parametrize(
    ("theirs", "advice"), [(SCHEMA - 2, "upgrade it"), (SCHEMA + 2, "upgrade this side")]
)
def test_two_versions_apart_are_refused_with_who_is_to_be_upgraded(
    theirs: int, advice: str
) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        check_schema(theirs, who="the agent of node7")
    for part in ("the agent of node7", str(theirs), str(SCHEMA), advice):
        assert part in str(caught.value)
