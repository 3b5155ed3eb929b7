"""All that a plugin may import, and the door through which every plugin comes in."""

from everstep.sdk.config import ConfigError, ConfigFile
from everstep.sdk.episodes import Episodes
from everstep.sdk.errors import EverstepError
from everstep.sdk.plugin import (
    Action,
    Collector,
    Detector,
    Notifier,
    Seconds,
    Stateful,
    Supported,
)
from everstep.wire.messages import PHASES, Evidence, Finding, RankProgress, Reading, Severity

__all__ = [
    "PHASES",
    "Action",
    "Collector",
    "ConfigError",
    "ConfigFile",
    "Detector",
    "Episodes",
    "EverstepError",
    "Evidence",
    "Finding",
    "Notifier",
    "RankProgress",
    "Reading",
    "Seconds",
    "Severity",
    "Stateful",
    "Supported",
]
