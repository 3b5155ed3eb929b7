"""Every message there can be, drawn from the types themselves: a new field is covered at once."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from everstep.wire import messages
from everstep.wire.messages import Message

MESSAGES: tuple[type[Message], ...] = tuple(
    sorted(
        (m for m in Message.__subclasses__() if m.__module__ == Message.__module__),
        key=lambda cls: cls.__name__,
    )
)

UNIONS: dict[str, Any] = {
    "rank or launcher to agent": messages.ClientMessage | messages.Numbered,
    "agent to its client": messages.AgentMessage,
    "agent to coordinator": messages.AgentToCoordinator,
    "coordinator to agent": messages.CoordinatorToAgent,
}


def kinds(union: Any) -> tuple[type[Message], ...]:
    """Return the messages of a union."""
    return get_args(union)


def instances(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for whole messages of one class."""
    return _of(mi.type_info(cls))


_SCALARS: dict[type[mi.Type], st.SearchStrategy[Any]] = {
    mi.NoneType: st.none(),
    mi.BoolType: st.booleans(),
    mi.StrType: st.text(max_size=12),
}


def _or(limit: float | None, otherwise: int) -> int:
    return otherwise if limit is None else int(limit)


def _of(kind: mi.Type) -> st.SearchStrategy[Any]:
    if type(kind) in _SCALARS:
        return _SCALARS[type(kind)]
    match kind:
        case mi.IntType(ge=least, le=most):
            return st.integers(_or(least, -(2**63)), _or(most, 2**64 - 1))
        case mi.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False)
        case mi.LiteralType(values=values):
            return st.sampled_from(values)
        case mi.UnionType(types=types):
            return st.one_of([_of(t) for t in types])
        case mi.ListType(item_type=item):
            return st.lists(_of(item), max_size=2)
        case mi.TupleType(item_types=items):
            return st.tuples(*(_of(t) for t in items))
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=2)
        case mi.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: _of(f.type) for f in fields})
        case _:
            raise TypeError(f"strategies.py does not know how to draw {kind}: teach it")
