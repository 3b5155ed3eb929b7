"""The relay between the node's clients and the coordinator.

It decides nothing and keeps nothing: what was not acknowledged is repeated by who said it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from everstep.agent.memory import Owner, Place
from everstep.wire.codec import check_schema
from everstep.wire.errors import MemoryRefusedError, PageRefusedError, SchemaMismatchError
from everstep.wire.exit_codes import UNAVAILABLE
from everstep.wire.messages import (
    Ask,
    ClientGone,
    ClientMessage,
    Evidence,
    Facts,
    Fetch,
    Finding,
    FromClient,
    Held,
    Hello,
    JobOver,
    Join,
    Joined,
    Link,
    Numbered,
    ToClient,
    Welcome,
)
from everstep.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from everstep.agent.client import Client
    from everstep.agent.disposal import Disposal
    from everstep.agent.findings import Findings
    from everstep.agent.memory import Memory
    from everstep.agent.progress import Progress

log = logging.getLogger(__name__)

MAX_PAGES_PER_USER = 64
_SPEAK_FOR_A_JOB = ("launcher", "rank")


class Up(Protocol):
    """The way to the coordinator."""

    @property
    def up(self) -> bool:
        """Whether a coordinator is reached now."""
        ...

    def send(self, message: FromClient | ClientGone) -> bool:
        """Send, or say False: nobody is reached, and nothing is kept."""
        ...


class Relay:
    """Owns the clients that have said Hello."""

    def __init__(
        self,
        *,
        node: str,
        version: str,
        uplink: Up,
        progress: Progress,
        memory: Memory,
        findings: Findings,
        disposal: Disposal,
        answer: Callable[[Literal["status", "plugins"]], Mapping[str, object]],
        clock: Callable[[], float],
    ) -> None:
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self._node = node
        self._version = version
        self._uplink = uplink
        self._progress = progress
        self._memory = memory
        self._findings = findings
        self._disposal = disposal
        self._answer = answer
        self._clock = clock

    # ------------------------------------------------------------------------ from below

    def heard(self, client: Client, message: ClientMessage | Numbered) -> None:
        """Take one message of a client: answer it here or hand it on."""
        if client.hello is None:
            self._first(client, message)
            return
        body = message.body if isinstance(message, Numbered) else message
        if isinstance(body, Ask):
            facts = msgspec.json.encode(self._answer(body.what))
            client.send(Facts(json=facts.decode()))
        elif isinstance(body, Fetch) and client.hello.role == "memory":
            self._fetch(client)
        elif isinstance(body, Fetch) or client.hello.role not in _SPEAK_FOR_A_JOB:
            client.fault("message that its role does not send", type(body).__name__)
        elif not isinstance(body, Hello) or client.hello.role == "rank":
            self._forward(client, body, message.seq if isinstance(message, Numbered) else 0)

    def gone(self, client: Client, *, died: bool) -> None:
        """Drop a client's page and tell the coordinator that it is gone, and how far it had got."""
        last = self._progress.last_words(client.id, time.monotonic_ns())
        self._progress.drop(client.id)
        if self.clients.pop(client.id, None) is None:
            return
        if client.hello is not None and client.hello.role in _SPEAK_FOR_A_JOB:
            at_s = self._clock()
            gone = ClientGone(client=client.id, peer=client.peer, died=died, at_s=at_s, last=last)
            self._uplink.send(gone)

    def owners(self) -> set[Owner]:
        """Return the jobs of which somebody is connected; a launcher's may not be known yet."""
        return {
            Owner(client.peer.uid, client.job)
            for client in self.clients.values()
            if client.hello and (client.job or client.hello.role == "launcher")
        }

    # ------------------------------------------------------------------------ from above

    def deliver(self, message: ToClient) -> None:
        """Hand a message of the coordinator to its client, if that is still there."""
        client = self.clients.get(message.client)
        if client is None:
            self.counts["to a client that is gone"] += 1
            return
        self.counts["to clients"] += 1
        match message.body:
            case Joined(nonce=nonce):
                client.job = nonce
            case JobOver(nonce=nonce):
                self._memory.job_over(Owner(client.peer.uid, nonce))
            case _:
                pass
        client.send(message.body)

    def link_changed(self) -> None:
        """Tell all clients whether the coordinator is reached now."""
        for client in list(self.clients.values()):
            client.send(Link(up=self._uplink.up))

    # ------------------------------------------------------------------------------------

    def _first(self, client: Client, message: ClientMessage | Numbered) -> None:
        if not isinstance(message, Hello):
            client.refuse(f"the first message must be Hello, not {type(message).__name__}")
            return
        try:
            check_schema(message.schema, who=f"everstep {message.version or 'of the client'}")
        except SchemaMismatchError as exc:
            client.refuse(str(exc), exit_code=UNAVAILABLE)
            return
        client.hello, client.job = message, message.job
        self.clients[client.id] = client
        if message.role == "memory":
            self._take_memory(client, message)
            return
        self._take_page(client, message)
        self._welcome(client)
        if message.role == "rank":
            self._forward(client, message, 0)

    def _welcome(self, client: Client) -> None:
        up = self._uplink.up
        client.send(Welcome(node=self._node, version=self._version, coordinator=up))
        client.send(Link(up=up))

    def _forward(self, client: Client, body: ClientMessage, seq: int) -> None:
        if isinstance(body, Join) and body.nonce:
            client.job = body.nonce
        sent = self._uplink.send(FromClient(client=client.id, peer=client.peer, body=body, seq=seq))
        self.counts["from clients" if sent else "dropped: no coordinator"] += 1

    def _take_memory(self, client: Client, hello: Hello) -> None:
        fds = client.take_fds()
        try:
            place = _place(client, hello)
            if fds or hello.slots:
                held, fds = self._memory.hold(place, fds, hello.slots), []
                self._welcome(client)
                client.send(Held(sizes=held))
            else:
                self._welcome(client)
        except MemoryRefusedError as exc:
            client.fault("memory refused", str(exc))
            client.refuse(f"rank {hello.rank}: {exc}", exit_code=UNAVAILABLE)
        finally:
            self._throw_away(fds)

    def _fetch(self, client: Client) -> None:
        if client.hello is None or client.hello.slots or client.fetched:
            client.fault("message that its role does not send", "Fetch, for the second time")
            return
        client.fetched = True
        slots = self._memory.slots(_place(client, client.hello))
        client.send_with(Held(sizes=[slot.size for slot in slots]), [slot.fd for slot in slots])

    def _take_page(self, client: Client, hello: Hello) -> None:
        fds = client.take_fds()
        try:
            if hello.role == "rank" and hello.page:
                self._follow(client, hello, fds[0] if fds else None)
            if len(fds) > int(hello.page):
                client.fault("descriptor where none belongs")
        except (PageRefusedError, OSError) as exc:
            client.fault("page refused", str(exc))
            self._findings.add("agent", self._refused_page(client, hello, str(exc)))
        finally:
            self._throw_away(fds)

    def _throw_away(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._disposal.close(fd)

    def _follow(self, client: Client, hello: Hello, fd: int | None) -> None:
        if fd is None:
            raise PageRefusedError("Hello announces a page but no descriptor came with it")
        if self._progress.count(client.peer.uid) >= MAX_PAGES_PER_USER:
            raise PageRefusedError(f"user {client.peer.uid} has {MAX_PAGES_PER_USER} pages already")
        reader = PageReader(fd)
        said = (hello.job or "", hello.generation or 0, hello.rank or 0)
        if said != reader.place[:3]:
            reader.close()
            raise PageRefusedError(f"Hello says {said}, the page says {reader.place[:3]}")
        self._progress.add(client.id, client.peer, reader)

    def _refused_page(self, client: Client, hello: Hello, why: str) -> Finding:
        peer = client.peer
        who = f"process {peer.pid} of user {peer.uid}"
        return Finding(
            name="page.refused",
            component="host" if hello.rank is None else f"rank:{hello.rank}",
            severity="warning",
            summary=f"the progress page of {who} was refused, so its stalls go unseen: {why}",
            at_s=self._clock(),
            evidence=[Evidence(at_s=self._clock(), what=why, source=who)],
            suggested_action="use the same version of everstep in the job as in the agent",
        )


def _place(client: Client, hello: Hello) -> Place:
    if not hello.job or hello.rank is None:
        raise MemoryRefusedError("Hello says neither whose nor which rank's memory it is about")
    return Place(client.peer.uid, hello.job, hello.rank)
