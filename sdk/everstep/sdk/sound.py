"""What a collector or detector may return, checked in its own thread before anybody uses it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

import msgspec

from everstep.sdk.guard import NonsenseError
from everstep.wire.codec import Decoder
from everstep.wire.errors import MalformedMessageError
from everstep.wire.messages import Finding, Reading

MAX_ITEMS = 10_000
MAX_ATTRIBUTES = 16
MAX_TEXT = 256
MAX_FINDING_BYTES = 64 * 1024

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,127}")
_finding: Decoder[Finding] = Decoder(Finding)


def observations(value: object) -> list[Reading | Finding]:
    """Return what `Collector.collect` gave as a list. Raises NonsenseError with the reason."""
    items = _listed(value)
    for item in items:
        if isinstance(item, Reading):
            _check_reading(item)
        elif isinstance(item, Finding):
            _check_finding(item)
        else:
            raise NonsenseError(f"returned {_shown(item)}, which is neither Reading nor Finding")
    return items  # type: ignore[return-value]  # each one has just been looked at


def findings(value: object) -> list[Finding]:
    """Return what `Detector.detect` gave as a list. Raises NonsenseError with the reason."""
    items = _listed(value)
    for item in items:
        if not isinstance(item, Finding):
            raise NonsenseError(f"returned {_shown(item)}, which is no Finding")
        _check_finding(item)
    return items  # type: ignore[return-value]  # each one has just been looked at


def _listed(value: object) -> list[object]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict)):
        raise NonsenseError(f"returned {_shown(value)} instead of a list (an empty one is fine)")
    items = list(itertools.islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise NonsenseError(f"returned more than {MAX_ITEMS} items")
    return items


def _check_reading(reading: Reading) -> None:
    # msgspec checks types when it decodes, not when Python code makes a Struct.
    if not isinstance(reading.name, str) or not _NAME.fullmatch(reading.name):
        raise NonsenseError(
            f"reading {_shown(reading.name)}: a name is dotted lower case, e.g. hw.gpu.temperature"
        )
    if reading.value is not None:
        _check_value(reading, reading.value)
    _check_labels(reading)


def _check_value(reading: Reading, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise NonsenseError(f"reading {reading.name}: value is {_shown(value)}, not a number")
    if isinstance(value, int) and abs(value) > 2**63:
        raise NonsenseError(f"reading {reading.name}: {_shown(value)} is beyond any counter")
    if reading.counter and not (math.isfinite(value) and value >= 0):
        raise NonsenseError(f"reading {reading.name}: a counter cannot be {_shown(value)}")


def _check_labels(reading: Reading) -> None:
    attributes = reading.attributes
    if not isinstance(attributes, dict) or len(attributes) > MAX_ATTRIBUTES:
        raise NonsenseError(
            f"reading {reading.name}: attributes must be a dict of at most {MAX_ATTRIBUTES}"
        )
    if not isinstance(reading.unit, str) or not reading.unit.isascii() or len(reading.unit) > 63:
        raise NonsenseError(f"reading {reading.name}: {_shown(reading.unit)} is no unit, e.g. By")
    for text in (*attributes.keys(), *attributes.values()):
        if not isinstance(text, str) or len(text) > MAX_TEXT or not _is_utf8(text):
            raise NonsenseError(
                f"reading {reading.name}: {_shown(text)} is no text of at most {MAX_TEXT} letters"
            )


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_finding(finding: Finding) -> None:
    try:
        body = msgspec.msgpack.encode(finding)
        _finding.decode(body)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as exc:
        raise NonsenseError(f"finding {_shown(finding.name)}: {exc}") from exc
    except MalformedMessageError as exc:
        raise NonsenseError(f"finding {_shown(finding.name)}: {exc}") from exc
    if len(body) > MAX_FINDING_BYTES:
        raise NonsenseError(f"finding {finding.name}: over {MAX_FINDING_BYTES} bytes of evidence")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  a stranger's __repr__ may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
