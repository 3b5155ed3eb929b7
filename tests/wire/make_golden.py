"""Writes one frame of every message to golden/v<schema>/: what this version sends, for ever.

    python -m tests.wire.make_golden

A file that exists is never written again: a message that changed so that its old file no longer
decodes has broken the older peers, and the right answer is a field with a default, or schema + 1
with its own folder. A new message gets a new file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as mi
from tests.wire.strategies import MESSAGES

from everstep.wire.codec import SCHEMA, frame

GOLDEN = Path(__file__).parent / "golden"


def example(cls: type[msgspec.Struct]) -> Any:
    """Return one instance with every field filled, the same on every call."""
    return _fill(mi.type_info(cls), "")


_SCALARS: dict[type[mi.Type], Any] = {mi.BoolType: True, mi.IntType: 3, mi.FloatType: 1.5}


def _fill(kind: mi.Type, name: str) -> Any:
    if type(kind) in _SCALARS:
        return _SCALARS[type(kind)]
    match kind:
        case mi.StrType():
            return f"<{name}>"
        case mi.LiteralType(values=values):
            return values[-1]
        case mi.UnionType(types=types):
            return _fill(next(t for t in types if not isinstance(t, mi.NoneType)), name)
        case mi.ListType(item_type=item):
            return [_fill(item, name)]
        case mi.TupleType(item_types=items):
            return tuple(_fill(t, name) for t in items)
        case mi.DictType(key_type=key, value_type=value):
            return {_fill(key, name): _fill(value, name)}
        case mi.StructType(cls=cls, fields=fields):
            return cls(**{f.name: _fill(f.type, f.name) for f in fields})
        case _:
            raise TypeError(f"make_golden.py does not know how to fill {kind}: teach it")


def main() -> None:
    """Write what is missing."""
    folder = GOLDEN / f"v{SCHEMA}"
    folder.mkdir(parents=True, exist_ok=True)
    for cls in MESSAGES:
        path = folder / f"{cls.__name__}.json"
        if path.exists():
            continue
        message = example(cls)
        both = {"value": msgspec.to_builtins(message), "frame": frame(message).hex()}
        path.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
