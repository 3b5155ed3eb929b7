"""What arrives is a message, or an error that says what is wrong; never anything else."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import MESSAGES, UNIONS, instances, kinds

from everstep.wire.codec import MAX_FRAME_BYTES, Decoder, Frames, encode, frame
from everstep.wire.errors import FrameError, MalformedMessageError, UnknownMessageError, WireError
from everstep.wire.messages import (
    Ack,
    AgentToCoordinator,
    Ask,
    ClientMessage,
    Facts,
    Finding,
    FromClient,
    Join,
    Numbered,
    Peer,
    RankEnded,
    RankFinding,
)

_pack = msgspec.msgpack.encode
_client: Decoder[Any] = Decoder(UNIONS["rank or launcher to agent"])


@given(data=st.data())
@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_went(data: st.DataObject, cls: type) -> None:
    message = data.draw(instances(cls))
    for union in UNIONS.values():
        if cls in kinds(union):
            assert Decoder[Any](union).decode(encode(message)) == message


def test_every_message_is_part_of_a_conversation() -> None:
    spoken = {cls for union in UNIONS.values() for cls in kinds(union)}
    assert spoken == set(MESSAGES)


@given(data=st.data())
def test_a_message_that_is_cut_short_is_malformed(data: st.DataObject) -> None:
    body = encode(data.draw(st.one_of([instances(cls) for cls in kinds(ClientMessage)])))
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(MalformedMessageError):
        _client.decode(body[:cut])


@given(data=st.data())
def test_a_message_with_a_flipped_byte_is_a_message_or_malformed(data: st.DataObject) -> None:
    body = bytearray(encode(data.draw(st.one_of([instances(c) for c in kinds(ClientMessage)]))))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    _decodes_or_is_malformed(bytes(body))


@given(body=st.binary(max_size=64))
def test_whatever_bytes_arrive_are_a_message_or_malformed(body: bytes) -> None:
    _decodes_or_is_malformed(body)


def _decodes_or_is_malformed(body: bytes) -> None:
    try:
        message = _client.decode(body)
    except MalformedMessageError:
        return
    assert isinstance(message, kinds(UNIONS["rank or launcher to agent"]))


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "Teleport"},
        {"kind": "Numbered", "seq": 1, "body": {"kind": "Teleport", "to": "moon"}},
        {"kind": "FromClient", "body": {"kind": "Teleport"}},
    ],
    ids=["itself", "inside a numbered one", "inside a relayed one"],
)
def test_an_unknown_kind_is_told_from_a_malformed_message(body: dict[str, Any]) -> None:
    if body["kind"] == "FromClient":
        peer = Peer(pid=1, uid=0, gid=0, start_ticks=1, boot_id="b")
        body = {**body, "client": "c", "peer": msgspec.to_builtins(peer)}
    with pytest.raises(UnknownMessageError, match="Teleport"):
        Decoder[Any](AgentToCoordinator | ClientMessage | Numbered).decode(_pack(body))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_pack({"seq": 1}), "missing required field `kind`"),
        (_pack({"kind": 3}), r"Expected `str`, got `int` - at `\$.kind`"),
        (_pack({"kind": "Ask"}), "missing required field `what`"),
        (_pack({"kind": "Ask", "what": "weather"}), "Invalid enum value 'weather'"),
        (_pack({"kind": "Ack", "seq": "1"}), "Invalid value 'Ack'"),
        (_pack([1, 2]), "got `array`"),
        (_pack("Ask"), "got `str`"),
        (b"", "truncated"),
        (encode(Ask(what="status")) + b"\x00", "trailing characters"),
        (b"\x82\xa4kind\xa3Ask\xa4what\xa2\xff\xfe", "UTF-8"),
        (b"\x82\xa4kind\xacRanksStarted\xa4pids\xdd\xff\xff\xff\xff", "truncated"),
    ],
)
def test_a_malformed_message_says_what_does_not_fit(body: bytes, told: str) -> None:
    with pytest.raises(MalformedMessageError, match=told):
        _client.decode(body)


def test_a_message_nested_without_end_is_malformed() -> None:
    body = b"\x83" + encode(Ask(what="status"))[1:] + b"\xa1x" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(MalformedMessageError, match="nested too deeply"):
        _client.decode(body)


def test_a_relayed_message_is_read_without_knowing_its_bytes_were_sliced() -> None:
    body = b"....." + encode(Ack(seq=3))
    assert Decoder[Ack](Ack).decode(memoryview(body)[5:]) == Ack(seq=3)


@given(data=st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(data: st.DataObject) -> None:
    messages = data.draw(st.lists(instances(Facts) | instances(Ask), max_size=5))
    stream = b"".join(frame(m) for m in messages)
    frames = Frames()
    bodies: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        bodies += frames.feed(stream[:size])
        stream = stream[size:]
    assert bodies == [encode(m) for m in messages]


@given(data=st.data())
def test_a_bad_message_does_not_spoil_the_frame_after_it(data: st.DataObject) -> None:
    junk = data.draw(st.binary(max_size=32))
    after = data.draw(instances(Join))
    bodies = Frames().feed(struct.pack("<I", len(junk)) + junk + frame(after))
    _decodes_or_is_malformed(bodies[0])
    assert _client.decode(bodies[1]) == after


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_an_absurd_length_breaks_the_stream_before_anything_is_kept(size: int) -> None:
    frames = Frames()
    with pytest.raises(FrameError, match="does not speak this protocol"):
        frames.feed(struct.pack("<I", size))


def test_an_http_client_is_not_taken_for_a_peer() -> None:
    with pytest.raises(WireError):
        Frames().feed(b"GET / HTTP/1.1\r\n\r\n")


def test_a_frame_of_the_largest_size_passes_and_one_byte_more_is_refused_by_the_sender() -> None:
    overhead = len(encode(Facts(json="x" * MAX_FRAME_BYTES))) - MAX_FRAME_BYTES
    largest = Facts(json="x" * (MAX_FRAME_BYTES - overhead))
    (body,) = Frames().feed(frame(largest))
    assert len(body) == MAX_FRAME_BYTES
    with pytest.raises(FrameError, match=rf"a Facts of {MAX_FRAME_BYTES + 1} bytes is over"):
        frame(Facts(json="x" * (MAX_FRAME_BYTES - overhead + 1)))


def test_an_empty_frame_is_a_malformed_message() -> None:
    (body,) = Frames().feed(b"\x00\x00\x00\x00")
    with pytest.raises(MalformedMessageError):
        _client.decode(body)


def test_a_relayed_message_keeps_its_sender() -> None:
    peer = Peer(pid=7, uid=1000, gid=1000, start_ticks=9, boot_id="b")
    relayed = FromClient(client="c1", peer=peer, body=Ask(what="status"))
    assert Decoder[Any](AgentToCoordinator).decode(encode(relayed)).peer == peer


ENDED = RankEnded(
    nonce="n", generation=1, rank=0, local_rank=0, pid=9, exit_code=1, signal=None, at_s=1.0
)
FOUND = Finding(name="n", component="host", severity="info", summary="s", at_s=1.0)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(ENDED, at_s=math.nan),
        msgspec.structs.replace(ENDED, generation=2**64 - 1),
        msgspec.structs.replace(ENDED, pid=-(2**63)),
        Numbered(seq=1, body=msgspec.structs.replace(ENDED, at_s=math.inf)),
        RankFinding(nonce="n", rank=0, step=1, finding=msgspec.structs.replace(FOUND, at_s=1e300)),
        Join(
            run_id="r",
            nonce=None,
            min_nodes=1,
            max_nodes=1,
            local_world_size=1,
            join_timeout_s=math.nan,
        ),
    ],
)
def test_a_number_that_the_journal_could_not_give_back_is_malformed(message: Any) -> None:
    with pytest.raises(MalformedMessageError):
        _client.decode(encode(message))


def test_text_that_is_no_unicode_arrives_spelled_out() -> None:
    said = msgspec.structs.replace(ENDED, error="no file m\udcfcll", stderr_tail=["\ud800"])
    heard = _client.decode(frame(Numbered(seq=1, body=said))[4:]).body
    assert heard == msgspec.structs.replace(
        said, error="no file m\\udcfcll", stderr_tail=["\\ud800"]
    )
