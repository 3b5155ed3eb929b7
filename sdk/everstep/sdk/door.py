"""The one door: finds plugins by entry point, validates their tables, makes them, lists them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

from everstep.sdk.config import ConfigError, ConfigFile, convert
from everstep.sdk.plugin import Supported

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

Kind = Literal["collectors", "detectors", "actions", "notifiers", "hooks"]
KINDS: tuple[Kind, ...] = ("collectors", "detectors", "actions", "notifiers", "hooks")
State = Literal["on", "off", "unsupported", "failed"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """One plugin as the door left it; `plugin` is None unless the state is `on`."""

    kind: Kind
    name: str
    source: str
    state: State
    why: str = ""
    plugin: Any = None
    config: msgspec.Struct | None = None


def installed(kind: Kind) -> dict[str, EntryPoint]:
    """Return the entry points of one kind by name; of two with one name the first wins."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"everstep.{kind}"):
        found.setdefault(point.name, point)
    return dict(sorted(found.items()))


def check(file: ConfigFile, kind: Kind) -> None:
    """Raise ConfigError for tables of plugins that are not installed."""
    file.check_names(kind, installed(kind), what=f"{kind.removesuffix('s')} plugin")


def admit(file: ConfigFile, kind: Kind, offers: Mapping[str, object]) -> list[Admitted]:
    """Make every installed plugin of one kind that its table does not turn off.

    `enabled = false` in a plugin's table turns it off. A wrong table raises ConfigError: a person
    wrote it. A plugin that cannot be imported or made is `failed` with the reason: the others and
    the daemon go on.
    """
    check(file, kind)
    return [_admit(file, kind, point, offers) for point in installed(kind).values()]


def _admit(
    file: ConfigFile, kind: Kind, point: EntryPoint, offers: Mapping[str, object]
) -> Admitted:
    source = point.dist.name if point.dist else point.module
    table = dict(file.tables.get(kind, {}).get(point.name, {}))
    where = f"{file.where}: [{kind}.{point.name}]"
    enabled = table.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{where}: key 'enabled': Expected `bool`, got {enabled!r}")
    try:
        cls = point.load()
        config_type = cls.Config
    except Exception as exc:  # noqa: BLE001  a stranger's module may raise anything at import
        return Admitted(kind, point.name, source, "failed", f"{type(exc).__name__}: {exc}")
    config = convert(table, config_type, where=where)
    if not enabled:
        return Admitted(kind, point.name, source, "off", "enabled = false", config=config)
    try:
        plugin = cls(config, **_asked_for(cls, offers))
        why = plugin.supported() if isinstance(plugin, Supported) else None
    except Exception as exc:  # noqa: BLE001  a stranger's constructor may raise anything
        return Admitted(kind, point.name, source, "failed", f"{type(exc).__name__}: {exc}")
    if why is not None:
        return Admitted(kind, point.name, source, "unsupported", why, plugin, config)
    return Admitted(kind, point.name, source, "on", "", plugin, config)


def _asked_for(cls: type, offers: Mapping[str, object]) -> dict[str, object]:
    names = list(inspect.signature(cls).parameters)[1:]
    missing = [n for n in names if n not in offers]
    if missing:
        offered = ", ".join(sorted(offers)) or "nothing"
        raise TypeError(f"asks for {', '.join(missing)}; on offer here: {offered}")
    return {n: offers[n] for n in names}
