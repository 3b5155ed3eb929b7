"""An agent as a rank sees it: takes pages and messages, acknowledges when told to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.messages import (
    Ack,
    ClientMessage,
    Hello,
    Link,
    Numbered,
    SnapshotCommitted,
    Welcome,
)
from everstep.wire.page import PageReader, State

_GREETING = frame(Welcome(node="n")) + frame(Link(up=True))


class FakeAgent:
    """Listens until `close`; everything heard is in `heard`, pages by rank in `pages`."""

    def __init__(self, folder: Path, *, acknowledge: bool = True) -> None:
        self.path = folder / "agent.sock"
        self.heard: list[ClientMessage] = []
        self.pages: dict[int, PageReader] = {}
        self.acknowledge = acknowledge
        self._decoder: Decoder[ClientMessage | Numbered] = Decoder(ClientMessage | Numbered)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def commits(self) -> list[SnapshotCommitted]:
        return [m for m in list(self.heard) if isinstance(m, SnapshotCommitted)]

    def state(self, rank: int) -> State | None:
        page = self.pages.get(rank)
        return page.state() if page else None

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)
        for thread in self._threads:
            thread.join(10)
        for page in self.pages.values():
            page.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        frames = Frames()
        with client, contextlib.suppress(OSError):
            data, fds, _, _ = socket.recv_fds(client, 65536, 4)
            while data:
                for body in frames.feed(data):
                    message = self._decoder.decode(body)
                    if isinstance(message, Hello) and not message.page:
                        client.sendall(_GREETING)
                    elif fds and isinstance(message, Hello):
                        self._greet(client, message, fds.pop())
                    self._take(client, message)
                data = client.recv(65536)

    def _greet(self, client: socket.socket, hello: Hello, page_fd: int) -> None:
        assert hello.page
        assert hello.rank is not None
        if hello.rank in self.pages:
            self.pages[hello.rank].close()
        self.pages[hello.rank] = PageReader(page_fd)
        os.close(page_fd)
        client.sendall(_GREETING)

    def _take(self, client: socket.socket, message: ClientMessage | Numbered) -> None:
        self.heard.append(message.body if isinstance(message, Numbered) else message)
        if isinstance(message, Numbered) and self.acknowledge:
            client.sendall(frame(Ack(seq=message.seq)))
