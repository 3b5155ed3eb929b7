"""One nursery as the launcher sees it: how it is started, and what it is good for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from everstep.launch.warm import frames, hook, stale

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROBE_S, _SEND_S = 30.0, 5.0
_HOOK = Path(__file__).parent / "hook"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a nursery is started as: Python's arguments, environment and working folder."""

    argv: tuple[bytes, ...]
    environ: Mapping[bytes, bytes]
    cwd: str

    def differs(self, rank: Spec) -> str | None:
        """Return why such a rank can't be forked from a nursery of this kind, None if it can."""
        script = stale.script_of(rank.argv)
        if script is None or script != stale.script_of(self.argv):
            return "the script is another one"
        if rank.cwd != self.cwd:
            return f"the working folder is {rank.cwd}, not {self.cwd}"
        name = stale.changed_variable(self.environ, rank.environ)
        return f"the environment variable {name} has changed" if name else None


@dataclass(slots=True, eq=False)
class Nest:
    """A nursery's process and the line to it."""

    spec: Spec
    process: subprocess.Popen[bytes]
    sock: socket.socket
    reader: frames.Reader
    ready: bool = False

    @classmethod
    def start(cls, spec: Spec) -> Self:
        """Start a nursery. Raises OSError, and RuntimeError where Python would run the script."""
        _probe(spec)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *spec.argv],
                env=_environment(spec, str(theirs.fileno())),
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(_SEND_S)
        return cls(spec, process, ours, frames.Reader(ours))

    @property
    def pid(self) -> int:
        """The nursery's pid."""
        return self.process.pid

    def close(self) -> None:
        """Hang up, which ends it and its ranks, and reap it."""
        self.sock.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its ranks go with it: PR_SET_PDEATHSIG
            self.process.wait(10)


def _probe(spec: Spec) -> None:
    """Make sure that our hook comes before the script: a nursery without it would train."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", "pass"],
        env=_environment(spec, hook.PROBE),
        cwd=spec.cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_PROBE_S,
        check=False,
    )
    if done.stdout != hook.PROBE.encode():
        raise RuntimeError(f"{sys.executable} does not import sitecustomize from PYTHONPATH")


def _environment(spec: Spec, role: str) -> dict[bytes, bytes]:
    environ = stale.of_nursery(spec.environ)
    original = environ.get(b"PYTHONPATH")
    if original is not None:
        environ[hook.PYTHONPATH.encode()] = original
    path = [os.fsencode(_HOOK), *([original] if original else [])]
    environ[b"PYTHONPATH"] = b":".join(path)
    environ[hook.ROLE.encode()] = role.encode()
    return environ
