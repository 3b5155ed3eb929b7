"""Who the command line's tests play with: a person who types, and a server that misbehaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.demo.ports import free_port
from everstep.cli.main import main

SETTINGS = ("EVERSTEP_COORDINATOR", "EVERSTEP_TOKEN", "EVERSTEP_SOCKET", "XDG_RUNTIME_DIR")


@dataclass(frozen=True)
class Ended:
    """How a verb ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Everstep:
    """Types commands; the environment and /etc of the machine that runs the tests are left out."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._capsys = capsys
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("EVERSTEP_SOCKET", str(folder / "nobody.sock"))
        monkeypatch.setattr("everstep.sdk.config.DEFAULT_PATHS", (folder / "everstep.toml",))
        monkeypatch.setattr("everstep.cli.api.DEFAULT_URL", f"http://127.0.0.1:{free_port()}")

    def __call__(self, *arguments: object) -> Ended:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        out, err = self._capsys.readouterr()
        return Ended(_code(ended.value.code), out, err)


def _code(code: object) -> int:
    assert code is None or isinstance(code, int), code
    return code or 0


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    token: str
    body: bytes


@dataclass
class Api:
    """An HTTP server; `says` maps `METHOD path` to a status and what to answer."""

    says: dict[str, tuple[int, Any]] = field(default_factory=dict)
    token: str = ""
    content_type: str = "application/json"
    asked: list[Asked] = field(default_factory=list)
    hangs: bool = False

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _answering(self))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        """Return status and body."""
        self.asked.append(asked)
        if self.hangs:
            self._over.wait(30)
        if self.token and asked.token != f"Bearer {self.token}":
            return 401, b'{"error": "the token is wrong"}'
        status, body = self.says.get(
            f"{asked.method} {asked.path}", (404, {"error": f"no {asked.path} here"})
        )
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


def _answering(api: Api) -> Callable[..., BaseHTTPRequestHandler]:
    class Answering(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            token = self.headers.get("Authorization", "")
            asked = Asked(self.command, self.path, token, self.rfile.read(length))
            status, body = api.answer(asked)
            self.send_response(status)
            self.send_header("Content-Type", api.content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _serve  # noqa: N815  http.server's names

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Answering
