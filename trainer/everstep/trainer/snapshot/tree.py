"""State dicts as flat tensors plus a small description of everything that is not one."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from everstep.snapshots.marker import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (type(None), bool, float, str, bytes)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)

Node = list[Any]
"""["dict", [[key, node], ...]] | ["list" | "tuple", [node, ...]] | ["tensor", key]
| ["plain", value] | ["torch", bytes], all of it MessagePack-able."""


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], Node]:
    """Return the tensors by dotted path, as DCP names them, and the shape they came from.

    A DTensor stays one. Raises SnapshotError for tensors that DCP does not describe and for two
    paths that read the same.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _describe(tree, "", tensors)


def unflatten(node: Node, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return what `flatten` was given, asking `tensor` for each by its path."""
    kind, body = node
    match kind:
        case "dict":
            return {key: unflatten(child, tensor) for key, child in body}
        case "list":
            return [unflatten(child, tensor) for child in body]
        case "tuple":
            return tuple(unflatten(child, tensor) for child in body)
        case "tensor":
            return tensor(body)
        case "torch":
            # Written by flatten() of this run, and checked bit by bit before it is read.
            return torch.load(io.BytesIO(body), weights_only=False)
        case _:
            return body


def paths(node: Node) -> list[str]:
    """Return the paths of all tensors in it."""
    kind, body = node
    if kind == "tensor":
        return [body]
    if kind == "dict":
        return [path for _, child in body for path in paths(child)]
    if kind in ("list", "tuple"):
        return [path for child in body for path in paths(child)]
    return []


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of it that this rank holds; a plain tensor is its own."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


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
    if path in tensors:
        raise SnapshotError(f"two entries of the state are both called {path}")
    strange = type(value) not in _TENSORS
    if strange or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        kind = type(value).__name__ if strange else f"{value.layout} tensor on {value.device}"
        raise SnapshotError(
            f"{path} is a {kind}: snapshots hold dense tensors and DTensors. Leave it out of "
            "the state, or give it as one of those"
        )
    tensors[path] = value.detach()
    return ["tensor", path]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
