"""What one event leads to: facts for the journal, and messages that wait until they are durable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from everstep.wire.messages import ToClient

if TYPE_CHECKING:
    from everstep.coordinator.books import Books
    from everstep.coordinator.facts import AnyFact
    from everstep.wire.messages import AgentMessage, CoordinatorToAgent


@dataclass(frozen=True, slots=True)
class Record:
    """Put this fact into the journal."""

    fact: AnyFact


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to an agent, once everything recorded before it is durable.

    To one connection, not to a node: an agent started anew knows nothing of its elder's clients.
    """

    connection: int
    message: CoordinatorToAgent


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close this connection of an agent."""

    connection: int
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand this to the actions or notifiers."""

    kind: Literal["actions", "notifiers"]
    what: dict[str, object]


class Address(NamedTuple):
    """Where a client of an agent is reached."""

    connection: int
    client: str


Effect = Record | Send | HangUp | Tell


@dataclass(slots=True)
class Turn:
    """One event's time, and its effects in the order in which they came about."""

    now_s: float
    books: Books
    effects: list[Effect] = field(default_factory=list)

    def record(self, fact: AnyFact) -> None:
        """Enter a fact into the books and the journal."""
        self.books.apply(fact)
        self.effects.append(Record(fact))

    def send(self, connection: int, message: CoordinatorToAgent) -> None:
        """Send to an agent."""
        self.effects.append(Send(connection, message))

    def send_client(self, to: Address, body: AgentMessage) -> None:
        """Send to one client of an agent."""
        self.send(to.connection, ToClient(client=to.client, body=body))

    def hang_up(self, connection: int, why: str) -> None:
        """Close an agent's connection."""
        self.effects.append(HangUp(connection, why))

    def tell(self, kind: Literal["actions", "notifiers"], what: dict[str, object]) -> None:
        """Hand something to the plugins of one kind."""
        self.effects.append(Tell(kind, what))
