"""The one door: finds plugins by entry point, validates their tables, makes them, lists them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from everstep.sdk.config import ConfigError, ConfigFile, convert
from everstep.sdk.deadline import within
from everstep.sdk.plugin import Action, Collector, Detector, Notifier, Plugin, Supported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["collectors", "detectors", "actions", "notifiers", "hooks"]
KINDS: tuple[Kind, ...] = ("collectors", "detectors", "actions", "notifiers", "hooks")
State = Literal["on", "off", "unsupported", "failed"]

PROTOCOLS: Mapping[Kind, type] = {
    "collectors": Collector,
    "detectors": Detector,
    "actions": Action,
    "notifiers": Notifier,
}
"""What a plugin of a kind must be. Hooks choose among named moments and have no verb in common."""

_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """One plugin as the door left it.

    `plugin` and `config` are there when the state is `on` or `unsupported`; `why` says what is the
    matter otherwise.
    """

    kind: Kind
    name: str
    source: str
    state: State
    why: str = ""
    plugin: Any = None
    config: msgspec.Struct | None = None


def installed(kind: Kind) -> dict[str, EntryPoint]:
    """Return the entry points of one kind by name; of two with one name everstep's own wins."""
    return {point.name: point for point in reversed(_points(kind))}


def check(file: ConfigFile, kind: Kind) -> None:
    """Raise ConfigError for tables of plugins that are not installed."""
    file.check_names(kind, installed(kind), what=f"{kind.removesuffix('s')} plugin")


def admit(
    file: ConfigFile, kind: Kind, offers: Mapping[str, object], *, deadline_s: float = _DEADLINE_S
) -> list[Admitted]:
    """Make every installed plugin of one kind that its table does not turn off.

    `enabled = false` in a plugin's table turns it off, and it is then not even imported. A wrong
    table raises ConfigError: a person wrote it. A plugin that cannot be imported or made, or that
    takes longer than `deadline_s` over it, is `failed` with the reason: the others and the daemon
    go on.
    """
    check(file, kind)
    admitted: list[Admitted] = []
    winners: dict[str, EntryPoint] = {}
    for point in _points(kind):
        winner = winners.setdefault(point.name, point)
        if winner is point:
            admitted.append(_admit(file, kind, point, offers, deadline_s))
        else:
            why = f"the name is taken by the plugin of {_source(winner)}: uninstall one of the two"
            admitted.append(Admitted(kind, point.name, _source(point), "failed", why))
    return admitted


def load(kind: Kind, point: EntryPoint) -> type:
    """Import a plugin and return its class.

    Raises TypeError when it is not a class of that kind, and whatever its import raises.
    """
    cls = point.load()
    if not isinstance(cls, type):
        raise TypeError(f"{point.value} is not a class")
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise TypeError(f"{point.value} has no `Config` that is a msgspec.Struct")
    if (protocol := PROTOCOLS.get(kind)) and not issubclass(cls, protocol):
        verb = next(name for name in vars(protocol) if not name.startswith("_"))
        raise TypeError(f"{point.value} has no {verb}(), which makes a {protocol.__name__.lower()}")
    return cls


def table(file: ConfigFile, kind: Kind, name: str) -> tuple[bool, dict[str, object]]:
    """Return whether a plugin is on, and its table without that. Raises ConfigError."""
    where = f"{file.where}: [{kind}.{name}]"
    found = file.tables.get(kind, {}).get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must be a table, not {found!r}")
    rest = {key: value for key, value in found.items() if key != "enabled"}
    enabled = found.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(
            f"{where}: key 'enabled': Expected `bool`, got {enabled!r}", key="enabled"
        )
    return enabled, rest


def configure(file: ConfigFile, kind: Kind, name: str, cls: type[Plugin]) -> msgspec.Struct:
    """Return a plugin's table as the `Config` of its class.

    Raises ConfigError for a wrong table and TypeError for defaults that are none.
    """
    _, found = table(file, kind, name)
    try:
        return convert(found, cls.Config, where=f"{file.where}: [{kind}.{name}]")
    except ConfigError as exc:
        if found:
            raise
        raise TypeError(f"its defaults do not form a valid Config: {exc}") from exc


def make(cls: Callable[..., Any], config: msgspec.Struct, offers: Mapping[str, object]) -> Any:
    """Return an instance with what its constructor asks for by name.

    Raises TypeError that lists what is on offer, and whatever the constructor raises.
    """
    asked = list(inspect.signature(cls).parameters.values())[1:]
    asked = [p for p in asked if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in asked if p.name not in offers and p.default is p.empty]
    if missing:
        offered = ", ".join(sorted(offers)) or "nothing"
        raise TypeError(f"asks for {', '.join(missing)}; on offer here: {offered}")
    return cls(config, **{p.name: offers[p.name] for p in asked if p.name in offers})


def _points(kind: Kind) -> list[EntryPoint]:
    def order(point: EntryPoint) -> tuple[str, bool, str]:
        return point.name, _source(point) != "everstep", _source(point)

    return sorted(entry_points(group=f"everstep.{kind}"), key=order)


def _source(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _admit(
    file: ConfigFile,
    kind: Kind,
    point: EntryPoint,
    offers: Mapping[str, object],
    deadline_s: float,
) -> Admitted:
    enabled, _ = table(file, kind, point.name)
    seen = Admitted(kind, point.name, _source(point), "failed")
    if not enabled:
        return replace(seen, state="off", why="enabled = false")

    def let_in() -> Admitted:
        cls: Any = load(kind, point)
        config = configure(file, kind, point.name, cls)
        plugin = make(cls, config, offers)
        why = plugin.supported() if isinstance(plugin, Supported) else None
        state: State = "on" if why is None else "unsupported"
        return replace(seen, state=state, why=why or "", plugin=plugin, config=config)

    try:
        # A rank has nobody else to serve, and a hook may need the thread that trains.
        return let_in() if kind == "hooks" else within(deadline_s, let_in)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:  # noqa: BLE001  a stranger's code may raise anything
        return replace(seen, why=f"{type(exc).__name__}: {exc}")
