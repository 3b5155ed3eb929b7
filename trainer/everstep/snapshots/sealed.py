"""Small JSON files that carry a checksum of themselves."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from everstep.sdk.errors import EverstepError

T = TypeVar("T", bound=msgspec.Struct)

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SnapshotError(EverstepError):
    """A snapshot cannot be used, or could not be made: which file and what is wrong with it."""


def seal(key: str, body: msgspec.Struct) -> bytes:
    """Return `body` as JSON under `key`, its XXH3-64 beside it."""
    raw = msgspec.json.encode(body)
    return msgspec.json.encode({"xxh3": xxhash.xxh3_64_hexdigest(raw), key: msgspec.Raw(raw)})


def unseal(data: bytes, key: str, type_: type[T], *, name: str) -> T:
    """Return what was sealed. Raises SnapshotError when it is cut short, damaged or another kind.

    `name` is the file's, for the message.
    """
    try:
        parts = _decoder.decode(data)
        body = bytes(parts[key])
        if msgspec.json.decode(parts["xxh3"], type=str) != xxhash.xxh3_64_hexdigest(body):
            raise SnapshotError(f"{name} is damaged: its checksum does not fit")
        return msgspec.json.decode(body, type=type_)
    except KeyError as exc:
        raise SnapshotError(f"{name} is damaged: it has no {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SnapshotError(f"{name} is damaged: {exc}") from exc
