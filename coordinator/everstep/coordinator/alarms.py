"""Silence as an alarm: one incident for a silent agent, one for many that fall silent at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import cases
from everstep.coordinator.incidents import MAX_CLUES, Clue, Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.coordinator.books import Books
    from everstep.coordinator.turn import Turn

_MANY = 16


class Alarms:
    """The open alarms; rebuilt from the books, so that a restart ends what it must."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._open: dict[int, set[str]] = {
            incident.id: {clue.node for clue in incident.clues}
            for incident in books.incidents.values()
            if incident.kind == "silence" and incident.closed_at_s is None
        }

    def raise_for(self, turn: Turn, nodes: Sequence[str]) -> None:
        """Open incidents for agents that are no longer heard."""
        if len(nodes) > _MANY:
            self._raise(turn, nodes, f"{len(nodes)} agents fell silent at once: our own network?")
            return
        for node in nodes:
            why = "silence is no death: nothing is done without a second witness"
            self._raise(turn, [node], why)

    def end_for(self, turn: Turn, nodes: Sequence[str]) -> None:
        """Close the incidents whose agents are all heard again."""
        for number, silent in list(self._open.items()):
            silent.difference_update(nodes)
            if not silent:
                del self._open[number]
                cases.close(turn, self._books.incidents[number])

    def _raise(self, turn: Turn, nodes: Sequence[str], why: str) -> None:
        clues = [
            Clue(
                at_s=self._books.node(node).silent_since_s or turn.now_s,
                kind="silent",
                node=node,
                what=f"agent of {node} is not heard",
            )
            for node in nodes[:MAX_CLUES]
        ]
        node = nodes[0] if len(nodes) == 1 else None
        incident = cases.open_for_nodes(turn, "silence", node, clues)
        cases.decide(turn, incident, Decision(what="none", why=why, node=node))
        self._open[incident.id] = set(nodes)
