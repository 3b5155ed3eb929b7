"""Byte tokens in one memory-mapped file, and the fixed windows of it that are the samples."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from everstep.sdk.config import ConfigError
from everstep.trainer.order import Shuffle

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT = "everstep-tokens-1"
END_OF_FILE = 0
"""The token put after each packed file."""


class TokensHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file beside a token file (`corpus.bin` has `corpus.bin.json`)."""

    tokens: int
    dtype: Literal["uint8", "uint16"]
    vocabulary: int
    files: int = 0
    format: str = FORMAT


def prepare_bytes(paths: Iterable[Path], out: Path) -> TokensHeader:
    """Pack files into `out`, one byte a token and `END_OF_FILE` after each, in sorted order.

    The result is in place whole or not at all. Raises ConfigError when there is nothing to pack.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    files = 0
    with partial.open("wb") as stream:
        for path in sorted(paths):
            stream.write(path.read_bytes())
            stream.write(bytes([END_OF_FILE]))
            files += 1
        tokens = stream.tell()
    if files == 0:
        partial.unlink()
        raise ConfigError(f"{out}: no files to pack; is the pattern right?")
    header = TokensHeader(tokens=tokens, dtype="uint8", vocabulary=256, files=files)
    _header_path(out).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=2))
    partial.replace(out)
    return header


class Windows:
    """The samples: windows of `seq_len` tokens plus the one that follows, in shuffled order."""

    def __init__(self, path: Path, *, seq_len: int, seed: int, vocabulary: int) -> None:
        """Map the file. Raises ConfigError with the reason when it cannot be trained on."""
        header = _read_header(path)
        if header.vocabulary > vocabulary:
            raise ConfigError(
                f"{path}: its tokens go up to {header.vocabulary - 1}, the model's vocabulary is "
                f"{vocabulary}: set [trainer.model] vocabulary = {header.vocabulary}"
            )
        self._tokens = _map(path, header)
        self.seq_len = seq_len
        self.count = (header.tokens - 1) // seq_len
        if self.count < 1:
            raise ConfigError(
                f"{path}: {header.tokens} tokens do not fill one window of {seq_len} + 1: pack "
                "more text or make seq_len smaller"
            )
        self._shuffle = Shuffle(self.count, seed)
        self._span = np.arange(seq_len + 1)

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows of these global sample indices, each `seq_len + 1` tokens."""
        starts = self._shuffle(indices) * self.seq_len
        windows: NDArray[np.int64] = self._tokens[starts[:, None] + self._span].astype(np.int64)
        return windows


def _header_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_header(path: Path) -> TokensHeader:
    try:
        header = msgspec.json.decode(_header_path(path).read_bytes(), type=TokensHeader)
    except OSError as exc:
        raise ConfigError(
            f"{path}: no readable header {_header_path(path).name} beside it ({exc.strerror}): "
            "make the file with everstep.trainer.prepare_bytes"
        ) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{_header_path(path)}: not a token header: {exc}") from exc
    if header.format != FORMAT:
        raise ConfigError(f"{_header_path(path)}: format {header.format!r}, known is {FORMAT!r}")
    return header


def _map(path: Path, header: TokensHeader) -> NDArray[np.generic]:
    dtype = np.dtype(header.dtype)
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if size != header.tokens * dtype.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes, its header says {header.tokens * dtype.itemsize}: it was cut "
            "short or the two do not belong together; pack it again"
        )
    return np.memmap(path, dtype=dtype, mode="r")
