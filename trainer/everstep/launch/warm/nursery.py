"""The nursery: loads what every rank loads, then forks ranks on the pool's request.

Runs inside `hook/sitecustomize.py`, with one thread and without an accelerator's context, both
looked at again before each fork. It tells the pool how each rank ended, and takes its ranks along
when it, or the launcher, ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.launch import reaper
from everstep.launch.warm import birth, frames, hook, reporter, stale

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

NAME = "everstep-warm"
PRELOAD = "EVERSTEP_PRELOAD"
MODULES = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel",
    "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors", "torch.utils.data",
    "msgspec", "everstep.trainer",
)  # fmt: skip
_OWN_VARIABLES = {b"PYTHONPATH", hook.ROLE.encode(), hook.PYTHONPATH.encode()}
_LOOK_AGAIN_S = 1.0


def run(control: int, at_start: Iterable[str]) -> None:
    """Serve the pool over its socket until it hangs up; returns in forked ranks only."""
    birth.die_with_parent(os.getppid())
    Path("/proc/self/comm").write_text(NAME)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if number not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            # A handler, not SIG_IGN: in a child that is not set up yet a signal must wait.
            signal.signal(number, _pass_over)
    sock = socket.socket(fileno=control)
    sock.set_inheritable(False)
    nursery = _Nursery(sock, at_start)
    nursery.load()
    nursery.serve()


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """What tells the whole job to stop is the ranks' affair, and their shims' to pass on."""


class _Nursery:
    def __init__(self, sock: socket.socket, at_start: Iterable[str]) -> None:
        self._sock = sock
        self._reader = frames.Reader(sock)
        self._at_start = frozenset(at_start)
        self._ranks: dict[int, int] = {}  # pidfd -> pid
        self._poll = select.poll()
        self._effects: dict[bytes, bytes | None] = {}
        self._loaded = stale.Loaded({}, {})
        self._looked_s = -_LOOK_AGAIN_S

    # ---- loading

    def load(self) -> None:
        """Import it all, and tell the pool that this nursery is ready, or of no use."""
        began_s = time.monotonic()
        try:
            _load_modules(os.environ.get(PRELOAD, ""))
        except Exception:  # noqa: BLE001  whatever a module does when it is imported
            lines = traceback.format_exc().strip().splitlines()
            self._send_useless(f"it cannot load its modules: {lines[-1]}")
        self._effects = _effects()
        _fork_in_vain()
        if why := self._unfit():
            self._send_useless(why)
        self._loaded = stale.snapshot(self._at_start)
        gc.collect()
        gc.freeze()
        frames.send(
            self._sock, "ready", {"ms": frames.whole(int((time.monotonic() - began_s) * 1e3))}
        )

    def _send_useless(self, why: str) -> None:
        frames.send(self._sock, "useless", {"why": [why.encode()]})
        os._exit(0)

    def _unfit(self) -> str | None:
        torch = sys.modules["torch"]
        return stale.unfit(accelerator=torch.cuda.is_initialized())

    # ---- serving

    def serve(self) -> None:
        """Fork when asked and report ends; returns in a rank."""
        self._poll.register(self._sock, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                try:
                    if self._attend(fd):
                        return
                except OSError:  # the pool is not there any more
                    self._end()

    def _attend(self, fd: int) -> bool:
        """See to a rank's end, or to what the pool says; True in a rank."""
        if fd in self._ranks:
            self._ended(fd)
            return False
        return self._hear()

    def _hear(self) -> bool:
        """Take what the pool says; True in a rank that was just forked."""
        messages = self._reader.read()
        if messages is None:
            self._end()
        return any(self._fork(message) for message in messages or ())

    def _end(self) -> None:
        """The launcher has died, or closed its pool."""
        for pid in self._ranks.values():
            reaper.kill_session(pid)
        os._exit(0)

    def _ended(self, pidfd: int) -> None:
        pid = self._ranks.pop(pidfd)
        self._poll.unregister(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        frames.send(self._sock, "ended", {"pid": frames.whole(pid), "code": frames.whole(code)})

    # ---- one rank

    def _fork(self, ask: frames.Message) -> bool:
        """Fork a rank, or say why not; True in the rank."""
        if why := self._unfit() or self._hidden(ask):
            self._refuse(ask, why, for_good=True)
            return False
        if why := self._changed():
            self._refuse(ask, why)
            return False
        reader, writer = os.pipe()
        nursery = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            fds = [self._sock.detach(), reader, *self._ranks]
            self._become(ask, fds, writer, nursery)
            return True
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._born(ask, pid, reader)
        return False

    def _become(self, ask: frames.Message, fds: list[int], writer: int, nursery: int) -> None:
        try:
            birth.become(ask, self._environment(ask), fds, parent=nursery)
        except BaseException as exc:  # noqa: BLE001  half a rank must not run
            os.write(writer, str(exc).encode()[:500] or b"?")
            os._exit(70)
        os.close(writer)
        reporter.start(dict(os.environ))

    def _born(self, ask: frames.Message, pid: int, reader: int) -> None:
        with open(reader, "rb") as pipe:
            why = pipe.read()
        if why:
            os.waitpid(pid, 0)
            self._refuse(ask, f"a rank could not be set up: {why.decode(errors='replace')}")
            return
        self._close(ask)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        frames.send(self._sock, "born", {"id": ask.fields["id"], "pid": frames.whole(pid)}, [pidfd])

    def _refuse(self, ask: frames.Message, why: str, *, for_good: bool = False) -> None:
        """Say no, `for_good` where another nursery would have to say so, too."""
        self._close(ask)
        answer = {
            "id": ask.fields["id"],
            "why": [why.encode()],
            "for_good": frames.whole(int(for_good)),
        }
        frames.send(self._sock, "refused", answer)

    def _close(self, ask: frames.Message) -> None:
        for fd in ask.fds:
            os.close(fd)

    def _environment(self, ask: frames.Message) -> dict[bytes, bytes]:
        """Return the rank's environment, with what importing the modules did to it."""
        environ = frames.environment(ask)
        for name, value in self._effects.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        return environ

    def _changed(self) -> str | None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return None  # for the other ranks of this generation
        if path := self._loaded.changed():
            return f"{path} has changed since it was loaded"
        self._looked_s = now_s
        return None

    def _hidden(self, ask: frames.Message) -> str | None:
        if module := _loaded_as_main(ask.fields["argv"]):
            return f"{module} is to be run, and is loaded already"
        ours = [entry for entry in sys.path if not entry.endswith(stale.PACKAGE_FOLDERS)]
        for folder in [script_folder(ask), *ours]:
            if shadow := self._loaded.shadowed_by(folder):
                return f"{shadow} stands before a loaded module of the same name"
        return None


def _loaded_as_main(argv: Sequence[bytes]) -> str | None:
    """Return the module that `-m` would find loaded before it runs it; Python warns of that."""
    name = os.fsdecode(argv[2]) if argv[1] == b"-m" else ""
    module = sys.modules.get(name)
    if hasattr(module, "__path__"):
        name += ".__main__"
    return name if name in sys.modules else None


def script_folder(ask: frames.Message) -> str:
    """Return the folder that Python will put first into `sys.path`."""
    argv = ask.fields["argv"]
    cwd = os.readlink(f"/proc/self/fd/{ask.fds[-1]}")  # noqa: PTH115  no pathlib before the fork
    if argv[1] == b"-m":
        return cwd
    script = os.path.realpath(os.path.join(cwd, os.fsdecode(argv[1])))  # noqa: PTH118  as above
    return script if os.path.isdir(script) else os.path.dirname(script)  # noqa: PTH112, PTH120  as above


def _effects() -> dict[bytes, bytes | None]:
    """Return what Python's start and our imports did to the environment; None is "removed"."""
    at_start = Path("/proc/self/environ").read_bytes().split(b"\0")
    before = {name: value for name, _, value in (entry.partition(b"=") for entry in at_start)}
    after = dict(os.environb)
    names = (before.keys() | after.keys()) - _OWN_VARIABLES - {b""}
    return {n: after.get(n) for n in names if before.get(n) != after.get(n)}


def _load_modules(preload: str) -> None:
    for name in MODULES:
        importlib.import_module(name)
    trainer = sys.modules["everstep.trainer"]
    for name in trainer.__all__:
        getattr(trainer, name)  # it loads its parts when they are asked for
    for entry in entry_points(group="everstep.hooks"):
        if entry.dist is not None and entry.dist.name == "everstep":
            entry.load()  # foreign ones may start whatever they like: in the rank, if it wants them
    import torch

    # The first optimizer pulls in much of torch._dynamo; zeros leave the random numbers alone.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    own = [name.strip() for name in preload.split(",") if name.strip()]
    if not own:
        return
    argv = sys.orig_argv
    first = str(Path.cwd()) if argv[2] == "-m" else str(Path(argv[2]).resolve().parent)
    sys.path.insert(0, first)
    try:
        for name in own:
            importlib.import_module(name)
    finally:
        sys.path.remove(first)


def _fork_in_vain() -> None:
    """Fork once for nothing: OpenBLAS ends the threads that it started at import before a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
