"""Reads torch's DCP format without torch: what tensors there are, and their numbers.

Nothing that a file names is ever executed: the two kinds of pickle in it are read by an unpickler
that knows a closed list of names, all of them harmless stand-ins.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251  a closed list of stand-ins; nothing in it is executed
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np

from everstep.snapshots.sealed import SnapshotError
from everstep.snapshots.verify import read_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.snapshots.places import Place

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
"""Elements as plain bytes: numpy has no name for some of torch's types."""

METADATA = ".metadata"

_LOCAL_HEADER = struct.Struct("<26xHH")
_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip


class Chunk(NamedTuple):
    """A part of a tensor, and where in which file it lies as an archive of torch's."""

    offsets: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dtype` in torch's words, e.g. `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def item_bytes(self) -> int:
        """Size of one element. Raises SnapshotError for a type this version does not know."""
        try:
            return _ITEM_BYTES[self.dtype]
        except KeyError as exc:
            raise SnapshotError(f"{self.name} is of an unknown type {self.dtype}") from exc

    @property
    def bytes(self) -> int:
        """Size of all elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.item_bytes


def tensors(place: Place, id_: str) -> list[Tensor]:
    """Return what tensors a complete snapshot holds, by name. Raises SnapshotError."""
    read_marker(place, id_)
    try:
        about = _Metadata(io.BytesIO(place.read(id_, METADATA))).load()
        stored = _by_name(about.storage_data)
        found = about.state_dict_metadata.items()
        return sorted(
            (_tensor(name, entry, stored) for name, entry in found if hasattr(entry, "chunks")),
            key=lambda one: one.name,
        )
    except OSError as exc:
        raise SnapshotError(f"{id_}/{METADATA} cannot be read: {exc.strerror or exc}") from exc
    except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, ValueError) as exc:
        raise SnapshotError(f"{id_}/{METADATA} is not DCP's of torch 2.13: {exc}") from exc


def _by_name(storage_data: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Any]:
    return {
        (i.fqn, tuple(getattr(i, "offset", None) or ())): info for i, info in storage_data.items()
    }


def _tensor(name: str, entry: Any, stored: Mapping[tuple[str, tuple[int, ...]], Any]) -> Tensor:
    chunks = []
    for one in entry.chunks:
        info = stored.get((name, tuple(one.offsets)))
        if info is None:
            raise SnapshotError(f"a part of {name} is nowhere in the snapshot's files")
        if getattr(info, "transform_descriptors", None):
            raise SnapshotError(f"{name} was compressed or encrypted by a DCP extension")
        chunks.append(Chunk(tuple(one.offsets), info.relative_path, info.offset, info.length))
    return Tensor(name, str(entry.properties[0]), tuple(entry.size), tuple(chunks))


def numbers(place: Place, id_: str, tensor: Tensor) -> Numbers:
    """Return a tensor's elements, put together from all its parts. Raises SnapshotError."""
    whole: Numbers = np.empty(tensor.shape, dtype=f"V{tensor.item_bytes}")
    for chunk in tensor.chunks:
        part = _archived(_read(place, id_, chunk), tensor)
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, part.shape, strict=True))
        if whole[where].shape != part.shape:
            raise SnapshotError(f"a part of {tensor.name} does not lie within it")
        whole[where] = part
    return whole


def _read(place: Place, id_: str, chunk: Chunk) -> bytes:
    try:
        with place.open(id_, chunk.file) as stream:
            stream.seek(chunk.start)
            return stream.read(chunk.length)
    except OSError as exc:
        raise SnapshotError(f"{id_}/{chunk.file} cannot be read: {exc.strerror or exc}") from exc


def _archived(archive: bytes, tensor: Tensor) -> Numbers:
    """Return the tensor in what `torch.save` has written."""
    try:
        records = _records(archive)
        if records.get("byteorder", b"little") != b"little":
            raise SnapshotError(f"{tensor.name} was written on a machine of another byte order")
        found = _Archive(io.BytesIO(records["data.pkl"])).load()
        if 0 in found.size:
            return np.empty(found.size, dtype=f"V{tensor.item_bytes}")
        data = np.frombuffer(records[f"data/{found.key}"], dtype=f"V{tensor.item_bytes}")
        strides = tuple(tensor.item_bytes * s for s in found.stride)
        last = sum(s * (n - 1) for s, n in zip(found.stride, found.size, strict=True))
        if found.offset + last >= len(data):
            raise SnapshotError(f"{tensor.name} is larger than what is stored of it")
        return np.lib.stride_tricks.as_strided(
            data[found.offset :], tuple(found.size), strides, writeable=False
        )
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, AttributeError) as exc:
        raise SnapshotError(f"{tensor.name} is not stored as torch.save does: {exc!r}") from exc


def _records(archive: bytes) -> dict[str, bytes | memoryview]:
    """Return the files of a torch archive; their own checksums may be off, the marker has ours."""
    view, found = memoryview(archive), {}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for info in opened.infolist():
            name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(archive, info.header_offset)
            start = info.header_offset + 30 + name_bytes + extra_bytes
            found[info.filename.partition("/")[2]] = view[start : start + info.file_size]
    return {k: v if k.startswith("data/") else bytes(v) for k, v in found.items()}


# --------------------------------------------------------------------------- the stand-ins


class _Record:
    """Whatever was an object: its attributes, or for a tuple of them its items."""

    def __new__(cls, *_: Any) -> Self:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.items = state

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


class _Index(_Record):
    """DCP's MetadataIndex, which is a key: by its identity, as none is looked up."""


class _Stored(NamedTuple):
    key: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _text(*words: Any) -> str:
    return "/".join(str(word) for word in words)


def _size(extents: Any = ()) -> tuple[int, ...]:
    return tuple(extents)


def _rebuilt(
    storage: tuple[Any, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> _Stored:
    return _Stored(str(storage[2]), offset, size, stride)


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    (_CHECKPOINT, "Metadata"): _Record,
    (_CHECKPOINT, "TensorStorageMetadata"): _Record,
    (_CHECKPOINT, "BytesStorageMetadata"): _Record,
    (_CHECKPOINT, "ChunkStorageMetadata"): _Record,
    (_CHECKPOINT, "TensorProperties"): _Record,
    (_CHECKPOINT, "StorageMeta"): _Record,
    (_CHECKPOINT, "MetadataIndex"): _Index,
    (_CHECKPOINT, "_MEM_FORMAT_ENCODING"): _text,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _text,
    ("torch", "Size"): _size,
    ("pathlib", "PosixPath"): _text,
    ("pathlib._local", "PosixPath"): _text,
    ("collections", "OrderedDict"): dict,
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _ITEM_BYTES:
            return name
        try:
            return _METADATA_NAMES[module, name]
        except KeyError as exc:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from exc


class _Archive(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuilt
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and name in _ITEM_BYTES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return cast("tuple[Any, ...]", pid)
