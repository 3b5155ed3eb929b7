"""The local agent, as the command line asks it over its Unix socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from everstep.cli.errors import VerbError
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import FrameError, MalformedMessageError, UnknownMessageError
from everstep.wire.ids import agent_socket
from everstep.wire.messages import AgentMessage, Ask, Facts, Hello, Refused

TIMEOUT_S = 5.0

_decoder: Decoder[AgentMessage] = Decoder(AgentMessage)


class AgentUnreachableError(VerbError):
    """No agent answers on the socket: why, and how to get one."""


def ask_agent(
    what: Literal["status", "plugins"], path: Path | None = None, *, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return what the agent on this machine knows. Raises AgentUnreachableError."""
    path = path or agent_socket(os.environ)
    hello = Hello(role="cli", version=version("everstep"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(os.fspath(path))
            sock.sendall(frame(hello) + frame(Ask(what=what)))
            for message in _heard(sock, path, time.monotonic() + timeout_s):
                if isinstance(message, Refused):
                    raise AgentUnreachableError(f"the agent on {path} refuses: {message.why}")
                if isinstance(message, Facts):
                    facts: dict[str, Any] = json.loads(message.json)
                    return facts
    except TimeoutError as exc:
        raise AgentUnreachableError(
            f"the agent on {path} does not answer within {timeout_s:g} s: look at its log, "
            "`journalctl -u everstep-agent`"
        ) from exc
    except OSError as exc:
        raise AgentUnreachableError(no_agent(path, exc)) from exc
    except (FrameError, MalformedMessageError, ValueError) as exc:
        raise AgentUnreachableError(f"what answers on {path} is no everstep agent: {exc}") from exc
    raise AgentUnreachableError(f"the agent on {path} hung up without an answer; see its log")


def _heard(sock: socket.socket, path: Path, end_s: float) -> Iterator[AgentMessage]:
    frames = Frames()
    while data := sock.recv(65536):
        for body in frames.feed(data):
            try:
                yield _decoder.decode(body)
            except UnknownMessageError:
                continue  # a newer agent says more than this version knows
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path} talks but does not answer")


def no_agent(path: Path, exc: OSError) -> str:
    """Return why nobody answers on an agent's socket, and what to do."""
    if isinstance(exc, PermissionError):
        return (
            f"{path}: permission denied: ask as root or as the user who runs the agent, or name "
            "another socket in EVERSTEP_SOCKET"
        )
    return (
        f"no agent on {path} ({exc.strerror or exc}). Start one with "
        "`everstep agent --coordinator HOST:PORT`, on a single machine with "
        "`everstep agent --with-coordinator`, or name its socket in EVERSTEP_SOCKET"
    )
