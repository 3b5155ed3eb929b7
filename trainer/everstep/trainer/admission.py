"""Lets hooks in through the one door, and only those that every rank has."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from everstep.sdk import ConfigFile, Finding
from everstep.sdk.door import admit
from everstep.trainer.group import from_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


def admit_hooks(file: ConfigFile, offers: Mapping[str, object]) -> dict[str, Any]:
    """Return the hooks that are on here, by name. Raises ConfigError for a wrong table."""
    hooks = {}
    for admitted in admit(file, "hooks", offers):
        if admitted.state == "on":
            hooks[admitted.name] = admitted.plugin
        elif admitted.state != "off":
            log.error("hook %s is %s: %s", admitted.name, admitted.state, admitted.why)
    return hooks


def on_every_rank(hooks: Mapping[str, Any], report: Callable[[Finding], None]) -> dict[str, Any]:
    """Return the hooks that all ranks have: what one rank lacks would steer it elsewhere."""
    everywhere = set.intersection(*(set(names) for names in from_all(sorted(hooks))))
    for name in sorted(hooks.keys() - everywhere):
        report(
            Finding(
                name="hook.missing",
                component="job",
                severity="error",
                summary=f"hook {name} is not on every rank, so it is off on all of them: see the "
                "other ranks' logs, and compare the installed versions",
                at_s=time.time(),
            )
        )
    return {name: hook for name, hook in hooks.items() if name in everywhere}
