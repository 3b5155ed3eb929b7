"""Writes a snapshot's tensors as safetensors: a length, a JSON header, then raw numbers."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.snapshots import dcp
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from everstep.snapshots.dcp import Tensor
    from everstep.snapshots.places import Place

SUFFIX = ".safetensors"

_ALIGNMENT = 8
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Named(NamedTuple):
    """A tensor and the name it gets in the file."""

    name: str
    tensor: Tensor


def chosen(found: Sequence[Tensor], *, prefix: str) -> list[Named]:
    """Return the tensors below `prefix`, named without it; all of them for "".

    Raises SnapshotError when there are none, naming what there is.
    """
    if not prefix:
        return [Named(one.name, one) for one in found]
    below = f"{prefix}."
    kept = [Named(t.name.removeprefix(below), t) for t in found if t.name.startswith(below)]
    if not kept:
        there = sorted({one.name.partition(".")[0] for one in found})
        raise SnapshotError(
            f"no tensor of it begins with {below!r}; there are those of {', '.join(there) or '-'}"
        )
    return kept


def split(names: Sequence[Named], *, most_bytes: int) -> list[list[Named]]:
    """Return the tensors in as many files as needed; one that is larger has a file of its own."""
    files: list[list[Named]] = [[]]
    used = 0
    for one in names:
        if files[-1] and used + one.tensor.bytes > most_bytes:
            files.append([])
            used = 0
        files[-1].append(one)
        used += one.tensor.bytes
    return files


def write(
    place: Place, id_: str, files: Sequence[Sequence[Named]], to: Path, about: dict[str, str]
) -> list[Path]:
    """Write the files and return them; with several, an index as Hugging Face's tools read it.

    Nothing stands under its final name before all of it is written. Raises SnapshotError, OSError.
    """
    paths = list(_paths(to, len(files)))
    for path, names in zip(paths, files, strict=True):
        _write_file(place, id_, names, path, about)
    if len(files) == 1:
        return paths
    index = to.with_name(f"{to.name}.index.json")
    weights = {n.name: p.name for p, names in zip(paths, files, strict=True) for n in names}
    total = sum(n.tensor.bytes for names in files for n in names)
    facts = {"metadata": {"total_size": total}, "weight_map": weights}
    with _replacing(index) as stream:
        stream.write(json.dumps(facts, indent=2).encode())
    return [*paths, index]


def _paths(to: Path, count: int) -> Iterator[Path]:
    if count == 1:
        yield to
        return
    for number in range(1, count + 1):
        yield to.with_name(f"{to.name.removesuffix(SUFFIX)}-{number:05d}-of-{count:05d}{SUFFIX}")


def _write_file(
    place: Place, id_: str, names: Sequence[Named], path: Path, about: dict[str, str]
) -> None:
    with _replacing(path) as stream:
        stream.write(_header(names, about))
        for one in names:
            stream.write(memoryview(dcp.numbers(place, id_, one.tensor).tobytes()))


def _header(names: Sequence[Named], about: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    at = 0
    for name, tensor in names:
        if tensor.dtype not in _TYPES:
            raise SnapshotError(f"safetensors has no type for {tensor.name}: {tensor.dtype}")
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _ALIGNMENT)
    return struct.pack("<Q", len(body)) + body


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
