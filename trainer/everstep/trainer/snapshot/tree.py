"""State dicts as flat tensors plus a small description of everything that is not one."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from everstep.snapshots.marker import SnapshotError

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (type(None), bool, float, str, bytes)

Node = list[Any]
"""["dict", [[key, node], ...]] | ["list" | "tuple", [node, ...]] | ["tensor", key]
| ["plain", value] | ["torch", bytes], all of it MessagePack-able."""


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], Node]:
    """Return the tensors by dotted path, as DCP names them, and the shape they came from.

    Raises SnapshotError for sharded tensors and for two paths that read the same.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _describe(tree, "", tensors)


def unflatten(tensors: dict[str, torch.Tensor], node: Node) -> Any:
    """Return what `flatten` was given, with these tensors in it."""
    kind, body = node
    match kind:
        case "dict":
            return {key: unflatten(tensors, child) for key, child in body}
        case "list":
            return [unflatten(tensors, child) for child in body]
        case "tuple":
            return tuple(unflatten(tensors, child) for child in body)
        case "tensor":
            return tensors[body]
        case "torch":
            # Written by flatten() of this run, and checked bit by bit before it is read.
            return torch.load(io.BytesIO(body), weights_only=False)
        case _:
            return body


def _describe(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor):
        return _tensor(value, path, tensors)
    if type(value) in _DICTS:
        pairs = [[k, _describe(v, _join(path, k), tensors)] for k, v in value.items()]
        return ["dict", pairs]
    if type(value) in (list, tuple):
        children = [_describe(v, _join(path, i), tensors) for i, v in enumerate(value)]
        return [type(value).__name__, children]
    if type(value) in _PLAIN or (type(value) is int and value.bit_length() < 64):
        return ["plain", value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return ["torch", buffer.getvalue()]


def _tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Node:
    if hasattr(value, "placements"):
        raise SnapshotError(f"{path} is a sharded tensor; snapshots hold replicated state so far")
    if path in tensors:
        raise SnapshotError(f"two entries of the state are both called {path}")
    tensors[path] = value.detach()
    return ["tensor", path]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
