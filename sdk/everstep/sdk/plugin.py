"""What each kind of plugin is: one verb, and a `Config` that is validated before it runs.

A plugin class has a `Config` (a frozen msgspec Struct whose defaults are the shipped behaviour)
and an `__init__(self, config, ...)`. Further parameters of `__init__` are what it asks for by name:
the part that loads it hands these over or refuses with the list of what it offers; one that has a
default is left out where it is not on offer. The agent offers `clock` (wall clock, seconds) and
`pages` (a function that returns every local rank's `RankProgress`). Plugins of the daemons are
called in a thread of their own each, never two calls at once, so they may block; a call that does
not come back within the config's `timeout_s` (where it has none, the daemon's own limit) is
reported and not repeated until it does. Plugins may be made in another thread than they run in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol, TypeAlias, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from everstep.wire.messages import Finding, Reading

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=7 * 86400)]
"""A duration in a `Config`: above zero and at most a week, so neither zero nor `inf` gets in."""


class Plugin(Protocol):
    """What all kinds share."""

    Config: ClassVar[type[msgspec.Struct]]


@runtime_checkable
class Collector(Protocol):
    """Agent: turns the outside into readings and findings. Called every `config.interval_s`."""

    def collect(self) -> Iterable[Reading | Finding]:
        """Look once. A finding is told when it begins and, `resolved`, when it ends."""
        ...


@runtime_checkable
class Detector(Protocol):
    """Agent: a pure function of the latest readings and its own small state."""

    def detect(self, readings: Sequence[Reading], now_s: float) -> Iterable[Finding]:
        """Return what is wrong now; the same finding may be returned again while it lasts."""
        ...


@runtime_checkable
class Action(Protocol):
    """Coordinator: carries out one decision, e.g. cordon a node in the scheduler."""

    def act(self, decision: Mapping[str, object]) -> None:
        """Do it, or raise: the reason is journaled with the incident."""
        ...


@runtime_checkable
class Notifier(Protocol):
    """Coordinator: tells people about an incident, when it opens and when it closes."""

    def notify(self, incident: Mapping[str, object]) -> None:
        """Send it, or raise."""
        ...


@runtime_checkable
class Supported(Protocol):
    """Optional: says that this machine has nothing to look at, which is a normal state.

    It may be asked again now and then, so that hardware which appears later is found.
    """

    def supported(self) -> str | None:
        """Return None when it can work here, else the reason in a few words."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Optional: what must survive a restart, as JSON-able values."""

    def state(self) -> Mapping[str, object]:
        """Return the state."""
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Take it back; a state that does not fit is ignored."""
        ...
