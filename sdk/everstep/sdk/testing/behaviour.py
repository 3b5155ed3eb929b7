"""Rules about what a plugin does when it is made and called."""

from __future__ import annotations

import difflib
import inspect
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from everstep.sdk import sound
from everstep.sdk.deadline import within
from everstep.sdk.door import make
from everstep.sdk.guard import NonsenseError
from everstep.sdk.hooks import MOMENTS
from everstep.sdk.plugin import Stateful, Supported
from everstep.sdk.testing.subject import findings, metrics
from everstep.wire.messages import Finding, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from everstep.sdk.testing.subject import Subject

_START_S = 10.0
_DETECT_S = 1.0
_COLLECT_S = 10.0
_PAUSE_S = 0.05  # what is a rate needs some time to have passed
_ODD = (
    Reading(name="no.such.metric", value=1.0),
    Reading(name="no.such.metric", value=None, attributes={"odd": ""}),
    Reading(name="no.such.metric", value=float("nan"), unit=""),
)


def can_be_made(subject: Subject) -> Iterator[str]:
    """The constructor asks for what is on offer, and opens nothing that may not be there."""
    made, why = _in_time(_START_S, lambda: _make(subject))
    if why:
        yield f"its constructor {why}"
        return
    if isinstance(made, Supported):
        reason, why = _in_time(_START_S, made.supported)
        if why:
            yield f"supported() {why}"
        elif reason is not None and not (isinstance(reason, str) and reason.strip()):
            yield f"supported() returned {reason!r}: None when it can work here, else the reason"


def hook_knows_its_moments(subject: Subject) -> Iterator[str]:
    """A hook with a misspelt moment would be silent for ever."""
    if subject.kind != "hooks":
        return
    public = [n for n, f in inspect.getmembers(subject.cls, callable) if not n.startswith("_")]
    moments = [name for name in public if name in set[str](MOMENTS)]
    if not moments:
        yield f"it has no method named after a moment; the moments are {', '.join(MOMENTS)}"
    for name in moments:
        if len(inspect.signature(getattr(subject.cls, name)).parameters) != 2:
            yield f"{name}() takes one argument beside self"
    for name in set(public) - set(moments):
        for close in difflib.get_close_matches(name, MOMENTS, n=1, cutoff=0.8):
            yield f"{name}() is no moment and will never be called (did you mean {close}?)"


def collector_returns_sound_readings(subject: Subject) -> Iterator[str]:
    """What is returned is documented, has a unit, comes in time, and comes again."""
    if subject.kind != "collectors":
        return
    plugin = _make(subject)
    interval_s = float(subject.cls.Config().interval_s)
    limit_s = subject.deadline_s or min(interval_s, _COLLECT_S)
    before: dict[object, float] = {}
    seen: set[str] = set()
    for call, pause_s in (("collect()", 0.0), ("collect(), called again,", _PAUSE_S)):
        time.sleep(pause_s)
        returned, why = _in_time(limit_s, lambda: sound.observations(plugin.collect()))
        if why:
            yield f"{call} {why}"
            return
        readings = [r for r in returned if isinstance(r, Reading)]
        yield from _documented(subject, readings)
        yield from _findings_documented(subject, [f for f in returned if isinstance(f, Finding)])
        yield from _one_series_each(readings, before)
        seen |= {r.name for r in readings}
    missing = metrics(subject.text("README.md") or "").keys() - seen
    if subject.complete and missing:
        yield f"README.md documents what collect() did not return: {', '.join(sorted(missing))}"


def _documented(subject: Subject, readings: Sequence[Reading]) -> Iterator[str]:
    known = metrics(subject.text("README.md") or "")
    for reading in {r.name: r for r in readings}.values():
        row = known.get(reading.name)
        what = "counter" if reading.counter else "gauge"
        if not reading.unit:
            yield f"{reading.name} has no unit; a plain number's is `1`"
        if row is None:
            yield (
                f"{reading.name} is not in the table under `## Metrics` of README.md: add "
                f"| `{reading.name}` | `{reading.unit}` | {what} | attributes | meaning |"
            )
        elif (row.unit, row.counter) != (reading.unit, reading.counter):
            told = f"`{row.unit}` {'counter' if row.counter else 'gauge'}"
            yield f"{reading.name} is a `{reading.unit}` {what}, README.md says a {told}"
    for name, attribute in sorted({(r.name, a) for r in readings for a in r.attributes}):
        if name in known and attribute not in known[name].attributes:
            yield f"README.md does not list attribute `{attribute}` of {name}"


def _findings_documented(subject: Subject, told: Sequence[Finding]) -> Iterator[str]:
    for name in sorted({f.name for f in told} - findings(subject.text("README.md") or "")):
        yield (
            f"finding {name} is not in the table under `## Findings` of README.md: add "
            f"| `{name}` | severity | meaning and what to do |"
        )


def _one_series_each(readings: Sequence[Reading], before: dict[object, float]) -> Iterator[str]:
    series = Counter((r.name, *sorted(r.attributes.items())) for r in readings)
    for name in sorted({str(key[0]) for key, count in series.items() if count > 1}):
        yield f"{name} comes more than once with the same attributes"
    for reading in readings:
        if not reading.counter or reading.value is None:
            continue
        key = (reading.name, *sorted(reading.attributes.items()))
        if reading.value < before.get(key, reading.value):
            yield f"{reading.name} is a counter and went down between two calls"
        before[key] = reading.value


def detector_is_a_pure_function(subject: Subject) -> Iterator[str]:
    """The same readings give the same findings, and readings of others are no trouble."""
    if subject.kind != "detectors":
        return
    rounds = [(), _ODD, (*_ODD, *subject.readings), tuple(subject.readings), ()]
    told: list[list[list[Finding]]] = []
    for _ in range(2):
        plugin = _make(subject)
        told.append([])
        for now_s, readings in enumerate(rounds, start=1):
            detect = _detect(plugin, readings, float(now_s))
            returned, why = _in_time(subject.deadline_s or _DETECT_S, detect)
            if why:
                yield f"detect() {why} (readings: {len(readings)})"
                return
            yield from _findings_documented(subject, returned)
            told[-1].append(returned)
    if told[0] != told[1]:
        yield "detect() of two instances differs for the same readings: it is to be pure"


def _detect(plugin: Any, readings: Sequence[Reading], now_s: float) -> Callable[[], list[Finding]]:
    return lambda: sound.findings(plugin.detect(readings, now_s))


def state_survives_a_restart(subject: Subject) -> Iterator[str]:
    """What a plugin keeps goes through JSON, and an older version's state does no harm."""
    if not issubclass(subject.cls, Stateful):
        return
    try:
        state = json.loads(json.dumps(_make(subject).state()))
    except Exception as exc:  # noqa: BLE001  a stranger's method may raise anything
        yield f"state() is not JSON-able: {type(exc).__name__}: {exc}"
        return
    for given in (state, {}, {"no_such_key": [1, "x", None]}):
        try:
            _make(subject).restore(given)
        except Exception as exc:  # noqa: BLE001  a stranger's method may raise anything
            yield f"restore({given!r}) raised {type(exc).__name__}: {exc}; ignore what does not fit"


def verb_takes_what_it_is_given(subject: Subject) -> Iterator[str]:
    """Actions and notifiers are not called here, so at least their form is looked at."""
    verbs: dict[str, tuple[str, Sequence[object]]] = {
        "collectors": ("collect", ()),
        "detectors": ("detect", ((), 0.0)),
        "actions": ("act", ({},)),
        "notifiers": ("notify", ({},)),
    }
    if subject.kind not in verbs:
        return
    verb, given = verbs[subject.kind]
    try:
        inspect.signature(getattr(subject.cls, verb)).bind(None, *given)
    except TypeError as exc:
        yield f"{verb}() is called with {len(given)} argument(s) beside self, which fails: {exc}"


def _make(subject: Subject) -> Any:
    return make(subject.cls, subject.cls.Config(), subject.offers)


def _in_time(limit_s: float, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what the call returned, or None and what is wrong with it."""
    try:
        return within(limit_s, call), None
    except (NonsenseError, TimeoutError) as exc:
        return None, str(exc)
    except BaseException as exc:  # noqa: BLE001  a stranger's code may raise anything
        return None, f"raised {type(exc).__name__}: {exc}"
