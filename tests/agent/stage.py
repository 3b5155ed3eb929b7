"""What the agent's tests play on: a real agent process, a coordinator that is told what to say,
and clients that speak whatever they like.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import WSMsgType, web
from tests.waiting import wait_until

from everstep.wire.codec import Decoder, Frames, encode, frame
from everstep.wire.messages import (
    AgentHello,
    AgentMessage,
    AgentToCoordinator,
    Ask,
    CoordinatorRefusal,
    CoordinatorToAgent,
    CoordinatorWelcome,
    Facts,
    FromClient,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Link,
    Message,
    RankProgress,
    Welcome,
)

M = TypeVar("M", bound=Message)
A = TypeVar("A")
DEADLINE_S = 30.0


class FakeCoordinator:
    """Speaks the contract from a thread of its own and keeps everything it hears."""

    def __init__(self, *, port: int = 0) -> None:
        self.port = port
        self.heard: list[Message] = []
        self.hellos: list[AgentHello] = []
        self.refuse: str | None = None
        self.mute = False
        self.clock_ahead_s = 0.0
        self._sockets: list[web.WebSocketResponse] = []
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connected(self) -> bool:
        return any(not ws.closed for ws in self._sockets)

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._call(self._start())

    def stop(self) -> None:
        """Hang up on everybody and listen no more, as a coordinator that ended would."""
        self._call(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def say(self, message: CoordinatorToAgent) -> None:
        """Send a message to the agent that connected last."""
        self.say_bytes(encode(message))

    def say_bytes(self, data: bytes) -> None:
        self._call(self._sockets[-1].send_bytes(data))

    def say_text(self, text: str) -> None:
        self._call(self._sockets[-1].send_str(text))

    def of(self, kind: type[M]) -> list[M]:
        """Return what was heard of one kind, oldest first."""
        return [m for m in list(self.heard) if isinstance(m, kind)]

    def bodies(self, kind: type[M]) -> list[M]:
        """Return what clients said of one kind, oldest first."""
        return [m.body for m in self.of(FromClient) if isinstance(m.body, kind)]

    def expect(self, kind: type[M], that: Callable[[M], object] = lambda _: True) -> M:
        """Wait for a message of a kind that fits, heard already or still to come."""
        found: list[M] = []

        def look() -> bool:
            found[:] = [m for m in self.of(kind) if that(m)]
            return bool(found)

        wait_until(f"{kind.__name__} at the coordinator; heard {self.heard[-5:]}", look)
        return found[0]

    def expect_connected(self) -> None:
        wait_until("the agent reaches the coordinator", lambda: self.connected)

    def rank(self, that: Callable[[RankProgress], object] = lambda _: True) -> RankProgress:
        """Wait for a heartbeat that tells of a rank that fits."""
        beat = self.expect(Heartbeat, lambda b: any(that(r) for r in b.ranks))
        return next(r for r in beat.ranks if that(r))

    def forget(self) -> None:
        self.heard.clear()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for ws in self._sockets:
            await ws.close()
        self._sockets.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        decoder: Decoder[AgentToCoordinator] = Decoder(AgentToCoordinator)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for raw in ws:
            if raw.type is not WSMsgType.BINARY:
                continue
            message = decoder.decode(raw.data)
            if isinstance(message, AgentHello):
                await self._answer_hello(ws, message)
                continue
            self.heard.append(message)
            if isinstance(message, Heartbeat) and not self.mute:
                now_s = time.time() + self.clock_ahead_s
                reply = HeartbeatReply(seq=message.seq, received_at_s=now_s, sent_at_s=now_s)
                await ws.send_bytes(encode(reply))
        return ws

    async def _answer_hello(self, ws: web.WebSocketResponse, hello: AgentHello) -> None:
        self.hellos.append(hello)
        if self.refuse is not None:
            await ws.send_bytes(encode(CoordinatorRefusal(why=self.refuse, retry_s=0.2)))
            await ws.close()
            return
        self._sockets.append(ws)
        await ws.send_bytes(encode(CoordinatorWelcome(epoch=1)))


@dataclass
class AgentProcess:
    """`everstep agent` as a process of its own, in a runtime folder of its own."""

    folder: Path
    arguments: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "agent.sock"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait: bool = True) -> AgentProcess:
        (self.folder / "agent.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "everstep.cli", "agent", "--socket", str(self.socket)]
        command += ["--listen", "127.0.0.1:0", *self.arguments]
        environ = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"} | self.environ
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        if wait:
            wait_until(f"the agent is ready:\n{self.log}", self._is_ready)
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        return (self.folder / "agent.json").exists()

    @property
    def listen(self) -> str:
        listen: str = json.loads((self.folder / "agent.json").read_text())["listen"]
        return listen

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page."""
        try:
            with urllib.request.urlopen(f"http://{self.listen}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def health(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.get("/healthz")[1])
        return facts

    def status(self) -> dict[str, Any]:
        """Return what `everstep status` would be told."""
        client = RawClient(self.socket)
        try:
            client.greet(Hello(role="cli"))
            client.say(Ask(what="status"))
            status: dict[str, Any] = json.loads(client.expect(Facts).json)
        finally:
            client.close()
        return status

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


class RawClient:
    """A client that says exactly what the test wants."""

    def __init__(self, path: Path) -> None:
        self.heard: list[AgentMessage] = []
        self.hung_up = False
        self._decoder: Decoder[AgentMessage] = Decoder(AgentMessage)
        self._frames = Frames()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))

    def say(self, message: Message, *fds: int) -> None:
        self.say_bytes(frame(message), *fds)

    def say_bytes(self, data: bytes, *fds: int) -> None:
        sent = socket.send_fds(self.sock, [data], list(fds))
        if rest := data[sent:]:
            self.sock.sendall(rest)

    def greet(self, hello: Hello, *fds: int) -> Welcome:
        """Say Hello and wait for the Link that ends the agent's answer."""
        self.say(hello, *fds)
        welcome = self.expect(Welcome)
        self.expect(Link)
        return welcome

    def expect(self, kind: type[M], that: Callable[[M], object] = lambda _: True) -> M:
        """Wait for a message of a kind that fits, heard already or still to come."""
        end = time.monotonic() + DEADLINE_S
        while True:
            for message in self.heard:
                if isinstance(message, kind) and that(message):
                    return message
            assert not self.hung_up, f"hung up before {kind.__name__}; heard {self.heard}"
            assert time.monotonic() < end, f"no {kind.__name__}; heard {self.heard}"
            self._read()

    def expect_hang_up(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while not self.hung_up:
            assert time.monotonic() < end, f"not hung up on; heard {self.heard}"
            self._read()

    def forget(self) -> None:
        self.heard.clear()

    def _read(self) -> None:
        try:
            data = self.sock.recv(65536)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.hung_up = not data
        self.heard += [self._decoder.decode(body) for body in self._frames.feed(data)]

    def close(self) -> None:
        self.sock.close()


class Stage:
    """Makes actors and sends them home at the end."""

    def __init__(self) -> None:
        # Not below tmp_path: a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-", dir="/tmp"))
        self._actors: list[Any] = []

    def coordinator(self, *, port: int = 0) -> FakeCoordinator:
        return self._add(FakeCoordinator(port=port))

    def agent(
        self,
        coordinator: FakeCoordinator | None = None,
        *,
        name: str = "n1",
        config: str = "",
        environ: dict[str, str] | None = None,
        start: bool = True,
    ) -> AgentProcess:
        """Start an agent; `config` is the body of its file."""
        folder = self.folder / name
        folder.mkdir()
        file = folder / "everstep.toml"
        file.write_text(config)
        arguments = ["--config", str(file), "--node", name]
        if coordinator is not None:
            arguments += ["--coordinator", coordinator.address]
        agent = self._add(AgentProcess(folder, arguments, environ or {}))
        return agent.start() if start else agent

    def client(self, agent: AgentProcess) -> RawClient:
        return self._add(RawClient(agent.socket))

    def run(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a Python process that is a client."""
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._actors.append(_Child(process))
        return process

    def _add(self, actor: A) -> A:
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        for actor in reversed(self._actors):
            actor.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _Child:
    process: subprocess.Popen[str]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)
