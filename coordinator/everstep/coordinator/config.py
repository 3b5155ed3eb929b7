"""The coordinator's table, the command line and the environment, settled into plain values."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from everstep.sdk.config import ConfigError, ConfigFile
from everstep.sdk.plugin import Seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LISTEN = "127.0.0.1:7070"

Mode = Literal["observe", "approve", "act"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Above0 = Annotated[float, msgspec.Meta(gt=0)]


class SilenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[coordinator.silence]`: when a node counts as lost, and a job as standing still."""

    silent_s: Seconds = 2.0  # an agent not heard for this long is silent, which is an alarm only
    start_grace_s: Seconds = 3.0  # after a start nobody is silent before this
    late_loop_s: Seconds = 0.5  # our own delay after which all silence timers start anew
    standing_s: Seconds = 2.0  # a rank stands past max(this, step_factor x its own p99 step)
    step_factor: Annotated[float, msgspec.Meta(ge=1)] = 3.0
    witness_s: Seconds = 10.0  # a rank that ends later than this after the silence proves nothing
    hang_s: Seconds = 5.0  # all ranks standing in `step`, all of them visible
    blind_hang_s: Seconds = 60.0  # the same, when some rank's agent is not heard
    stall_s: Seconds = 3600.0  # all ranks standing in whatever phase


class BudgetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[coordinator.budget]`: failures without progress, after which a job is stopped."""

    same_cause: Count = 2  # the same error again
    mixed: Count = 3  # errors of any kind, and hangs
    same_rank_killed: Count = 5  # the same rank killed by the same signal, more often than this
    outside: Count = 20  # kills, lost nodes and launchers that went


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[coordinator.breaker]`: how much of a job may be evicted in how short a time."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    window_s: Seconds = 300.0


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Table `[coordinator]`."""

    listen: str = DEFAULT_LISTEN  # host:port for agents, the HTTP API and /metrics
    state_dir: str | None = None  # None: /var/lib/everstep, or below $XDG_STATE_HOME
    token: str = ""  # what agents and API clients must show; "" asks for nothing
    token_file: str | None = None
    insecure: bool = False  # listen beyond loopback without a token
    mode: Mode = "act"  # observe: say what would be evicted or stopped; approve: wait for a person
    settle_s: Seconds = 2.0  # the first generation starts when nobody new came for this long
    bind_s: Seconds = 2.0  # for the first member's store to listen
    root_wait_s: Seconds = 0.5  # for the cause, when the first rank to end is only a witness
    absent_s: Seconds = 10.0  # a plan waits this long for an agent that is away
    early_absent_s: Seconds = 120.0  # the same, once its ranks are up and before the first step
    rejoin_s: Seconds = 10.0  # a place without a spare waits this long for its launcher
    grow_settle_s: Seconds = 10.0  # a job does not grow more often than this
    grow_wait_s: Seconds = 300.0  # it grows at the next snapshot, without one after this
    testing_s: Seconds = 60.0  # for a node that came back to show that it is well
    max_clock_offset_s: Seconds = 5.0  # a node further off fails its test
    forget_jobs_s: Above0 = 30 * 86400.0  # ended this long ago
    mtbf_prior_h: Above0 = 2500.0  # a node's hours to a failure, until a job has shown its own
    mtbf_prior_weight: Above0 = 0.1  # how many failures seen count as much as that
    silence: SilenceConfig = SilenceConfig()
    budget: BudgetConfig = BudgetConfig()
    breaker: BreakerConfig = BreakerConfig()

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise ValueError("token and token_file exclude each other")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything settled: where to listen, where the journal is, and the token."""

    config: CoordinatorConfig
    host: str
    port: int
    state_dir: Path
    token: str


def settle(
    file: ConfigFile,
    environ: Mapping[str, str],
    *,
    root: bool,
    listen: str | None = None,
    state_dir: Path | None = None,
) -> Settings:
    """Return what command line, file and environment come to, the first one named first served.

    Raises ConfigError, also for a listening address that anybody could reach without a token.
    """
    config = file.section("coordinator", CoordinatorConfig)
    where = f"{file.where}: [coordinator]"
    host, port = parse_listen(listen or config.listen, where=where)
    token = _token(config, where)
    if not (token or config.insecure or is_loopback(host)):
        raise ConfigError(
            f"{where}: listen: {host} can be reached from other machines and no token is set: "
            "anybody there could stop jobs; set token_file (or insecure = true to allow it)"
        )
    folder = state_dir or Path(config.state_dir or default_state_dir(environ, root=root))
    return Settings(config, host, port, folder, token)


def parse_listen(text: str, *, where: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    >>> parse_listen("[::1]:0", where="x")
    ('::1', 0)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(
            f"{where}: listen: {text!r} is not host:port, e.g. {DEFAULT_LISTEN} "
            "(port 0 takes a free one)"
        )
    return host.strip("[]") or "0.0.0.0", int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_state_dir(environ: Mapping[str, str], *, root: bool) -> Path:
    """Return where the journal lives when nobody says otherwise."""
    if root:
        return Path("/var/lib/everstep")
    home = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '~')}/.local/state"
    return Path(home).expanduser() / "everstep"


def _token(config: CoordinatorConfig, where: str) -> str:
    if config.token_file is None:
        return config.token
    try:
        token = Path(config.token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: token_file: {config.token_file}: {exc}") from exc
    if not token:
        raise ConfigError(f"{where}: token_file: {config.token_file} is empty")
    return token
