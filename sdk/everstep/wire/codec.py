"""Framing (u32 length + MessagePack) and typed decoding."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from everstep.wire.errors import (
    FrameError,
    MalformedMessageError,
    SchemaMismatchError,
    UnknownMessageError,
)

SCHEMA = 1
"""The version of every message in `everstep.wire.messages`. One version older is understood too."""

MAX_FRAME_BYTES = 16 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Return the MessagePack bytes of a message; text that is no Unicode is spelled out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # Python's stand-in for bytes of an argument or a file's name
        return _encoder.encode(_spelled_out(msgspec.to_builtins(message)))


def _spelled_out(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_spelled_out(k): _spelled_out(v) for k, v in value.items()}
        case list() | tuple():
            return [_spelled_out(v) for v in value]
        case _:
            return value


def frame(message: msgspec.Struct) -> bytes:
    """Return the message with its length in front, ready for a stream socket.

    Raises FrameError when it is larger than `MAX_FRAME_BYTES`.
    """
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {type(message).__name__} of {len(body)} bytes is over {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


class Decoder(Generic[T]):
    """Decodes one union of messages.

    >>> from everstep.wire.messages import Ack
    >>> Decoder(Ack).decode(encode(Ack(seq=3)))
    Ack(seq=3)
    """

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, body: bytes | memoryview | msgspec.Raw) -> T:
        """Return the typed message.

        Raises UnknownMessageError for a kind that this version does not know and
        MalformedMessageError for everything else that does not fit.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as exc:
            if "Invalid value" in str(exc) and str(exc).endswith("kind`"):
                raise UnknownMessageError(f"unknown kind of message: {exc}") from exc
            raise MalformedMessageError(f"message does not fit its type: {exc}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise MalformedMessageError(f"not MessagePack: {exc}") from exc
        except RecursionError as exc:
            raise MalformedMessageError("nested too deeply to be a message") from exc


class Frames:
    r"""Cuts a byte stream into frames; feed it whatever arrives.

    >>> f = Frames()
    >>> list(f.feed(b"\x01\x00"))
    []
    >>> [bytes(b) for b in f.feed(b"\x00\x00a")]
    [b'a']
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the complete frames so far. Raises FrameError when a length is absurd."""
        self._buffer += data
        out: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise FrameError(
                    f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}: "
                    "the peer does not speak this protocol"
                )
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            out.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return out


def check_schema(theirs: int, *, who: str) -> None:
    """Raise SchemaMismatchError unless the peer's schema is ours or the one before or after.

    The one after is accepted because the newer side is the one that knows how to talk down.
    """
    if abs(theirs - SCHEMA) > 1:
        older = "it" if theirs < SCHEMA else "this side"
        raise SchemaMismatchError(
            f"{who} speaks schema {theirs}, this side {SCHEMA}; one version apart is the most: "
            f"upgrade {older}"
        )
