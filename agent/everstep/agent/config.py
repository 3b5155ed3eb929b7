"""The agent's table, the command line and the environment, settled once into plain values."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from everstep.sdk.config import ConfigError, ConfigFile
from everstep.sdk.plugin import Seconds
from everstep.sdk.systemd import watchdog_interval_s
from everstep.wire.ids import agent_socket

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LISTEN = "127.0.0.1:9464"
COORDINATOR_PATH = "/v1/agent"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_SYSTEM_SOCKET = Path("/run/everstep/agent.sock")
_MAX_SOCKET_PATH = 107


Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Table `[agent]`."""

    node: str | None = None  # None: the host's name
    socket: str | None = None  # None: /run/everstep/agent.sock, or below $XDG_RUNTIME_DIR
    socket_mode: int | None = None  # None: 0o666 when started by root, else 0o600
    listen: str = DEFAULT_LISTEN  # /metrics and /healthz; port 0 takes any free one
    coordinators: list[str] = []  # host:port or ws://host:port, tried in turn
    token: str = ""
    token_file: str | None = None
    address: str | None = None  # where peers reach this node's ranks; None: as the coordinator sees
    heartbeat_s: Seconds = 1.0
    look_s: Seconds = 1.0  # how often progress pages are read when no heartbeat asks for it
    reply_timeout_s: Seconds = 5.0  # a coordinator silent for longer is left for the next
    retry_first_s: Seconds = 0.1
    retry_last_s: Seconds = 2.0
    plugin_timeout_s: Seconds = 5.0  # for plugins without a timeout_s of their own
    max_clients: int = 1024
    max_series: int = 2000  # per plugin
    memory_grace_s: Seconds = 120.0  # a job's snapshots in memory outlive its last client so long
    memory_user_share: Share = 0.75  # of what is free without them: what one user may have held
    memory_share: Share = 0.9  # the same, of all users

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise ValueError("token and token_file exclude each other")
        if self.socket_mode is not None and not 0 < self.socket_mode <= 0o777:
            raise ValueError("socket_mode must be permission bits such as 0o660")
        if self.max_clients < 1 or self.max_series < 1:
            raise ValueError("max_clients and max_series must be at least 1")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says; None and empty leave it to the file."""

    node: str | None = None
    socket: Path | None = None
    listen: str | None = None
    coordinators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything settled: names, addresses, and what the service manager asked for."""

    config: AgentConfig
    node: str
    socket: Path
    socket_mode: int
    host: str
    port: int
    coordinators: tuple[str, ...]
    token: str
    service_manager: Mapping[str, str]  # $NOTIFY_SOCKET, where there is one
    watchdog_s: float | None  # how often it wants to hear that the loop is turning


def settle(file: ConfigFile, overrides: Overrides, environ: Mapping[str, str]) -> Settings:
    """Return what command line, file and environment come to, the first one named first served.

    Raises ConfigError with what is wrong and where.
    """
    config = file.section("agent", AgentConfig)
    where = f"{file.where}: [agent]"
    host, port = parse_listen(overrides.listen or config.listen, where=where)
    return Settings(
        config=config,
        node=_node(overrides.node or config.node or socket.gethostname(), where),
        socket=_socket_path(overrides.socket or config.socket, environ),
        socket_mode=config.socket_mode or (0o666 if os.geteuid() == 0 else 0o600),
        host=host,
        port=port,
        coordinators=tuple(
            coordinator_url(text, where=where)
            for text in overrides.coordinators or config.coordinators
        ),
        token=_token(config, where),
        service_manager={k: v for k, v in environ.items() if k == "NOTIFY_SOCKET"},
        watchdog_s=watchdog_interval_s(environ),
    )


def parse_listen(text: str, *, where: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    >>> parse_listen("[::1]:0", where="x")
    ('::1', 0)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{where}: listen: {text!r} is not host:port, e.g. {DEFAULT_LISTEN} "
            "(port 0 takes a free one)"
        )
    return host.strip("[]") or "0.0.0.0", int(port)


def coordinator_url(text: str, *, where: str) -> str:
    """Return the WebSocket's address for what a person wrote.

    >>> coordinator_url("head:9465", where="x")
    'ws://head:9465/v1/agent'
    """
    url = text if "://" in text else f"ws://{text}"
    try:
        parts = urlsplit(url)
        if parts.scheme in ("ws", "wss") and parts.hostname and parts.port:
            path = parts.path.rstrip("/") or COORDINATOR_PATH
            return f"{parts.scheme}://{parts.netloc}{path}"
    except ValueError:
        pass  # a port that is no number, a bracket left open
    raise ConfigError(f"{where}: coordinators: {text!r} is neither host:port nor ws://host:port")


def _node(name: str, where: str) -> str:
    if not _NODE.fullmatch(name):
        raise ConfigError(
            f"{where}: node: {name!r} is no node name: letters, digits, '.', '-' and '_' only"
        )
    return name


def _socket_path(chosen: str | Path | None, environ: Mapping[str, str]) -> Path:
    if chosen is not None:
        path = Path(chosen)
    elif os.geteuid() == 0 and not environ.get("EVERSTEP_SOCKET"):
        path = _SYSTEM_SOCKET  # root's agent serves every user, whatever session started it
    else:
        path = agent_socket(environ)
    path = path.absolute()
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path}: the socket's path has more than {_MAX_SOCKET_PATH} bytes, which the kernel "
            "does not take; choose a shorter one with --socket"
        )
    return path


def _token(config: AgentConfig, where: str) -> str:
    if config.token_file is None:
        return config.token
    try:
        return Path(config.token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: token_file: {config.token_file}: {exc}") from exc
