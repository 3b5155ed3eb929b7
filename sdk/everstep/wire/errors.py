"""What can be wrong with something that came from another process."""

from __future__ import annotations


class WireError(Exception):
    """Root of everything that a peer can get wrong; it never kills a daemon."""


class FrameError(WireError):
    """The byte stream itself is broken: nothing after it can be trusted, close the connection."""


class MalformedMessageError(WireError):
    """One message does not parse; the frame after it is still good."""


class UnknownMessageError(MalformedMessageError):
    """A message of a kind that this version does not know: skip it, count it, go on."""


class SchemaMismatchError(WireError):
    """The peer speaks a schema version that is neither ours nor the one before."""


class PageRefusedError(WireError):
    """A progress page that cannot be read safely (unsealed, resized, not one of ours)."""


class MemoryRefusedError(WireError):
    """Memory that the agent does not hold for its rank: why, and what to do."""
