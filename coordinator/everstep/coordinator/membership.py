"""Who trains in the next generation. Pure: the same nodes always give the same answer.

Members keep their order; a spare takes the place of whoever is gone, so that ranks stay put; what
is left over is parked as a spare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from everstep.wire.messages import Member


@dataclass(frozen=True, slots=True)
class Ready:
    """Its launcher waits for a plan, or runs ranks that it can stop."""

    member: Member


@dataclass(frozen=True, slots=True)
class Away:
    """Nobody knows: its agent is not heard. A member is waited for, spare or no spare."""

    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Its launcher ended. A spare takes the place at once; without one it is waited for."""

    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Out:
    """Takes no part: evicted, absent for too long, or done."""

    why: str


Standing = Ready | Away | Gone | Out


@dataclass(frozen=True, slots=True)
class Form:
    """These train, in rank order; those are parked."""

    members: tuple[Member, ...]
    spares: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `until_s` None means that only another node, or one that returns, can help."""

    until_s: float | None
    why: str


Choice = Form | Wait


def choose(
    previous: Sequence[str],
    nodes: Mapping[str, Standing],
    *,
    at_least: int,
    at_most: int,
    now_s: float,
) -> Choice:
    """Return the next generation's members.

    `previous` are the members of the one before, in rank order. `nodes` are all that joined, in
    the order in which they did.
    """
    spares = [n for n, s in nodes.items() if isinstance(s, Ready) and n not in previous]
    places: list[Member] = []
    waits: list[Away | Gone] = []
    for node in previous:
        standing = nodes.get(node, Out("it never joined"))
        if isinstance(standing, Ready):
            places.append(standing.member)
        elif (wait := _worth_waiting(standing, now_s, spare=bool(spares))) is not None:
            waits.append(wait)
        elif spares:
            places.append(_member(nodes, spares.pop(0)))
    if waits:
        return Wait(min(w.until_s for w in waits), "; ".join(w.why for w in waits))
    while spares and len(places) < at_most:
        places.append(_member(nodes, spares.pop(0)))
    if len(places) < at_least:
        return Wait(None, f"{len(places)} of at least {at_least} nodes are here")
    surplus = [m.node for m in places[at_most:]]
    return Form(tuple(places[:at_most]), tuple(surplus + spares))


def _worth_waiting(standing: Standing, now_s: float, *, spare: bool) -> Away | Gone | None:
    match standing:
        case Away(until_s=until_s) if now_s < until_s:
            return standing
        case Gone(until_s=until_s) if now_s < until_s and not spare:
            return standing
        case _:
            return None


def _member(nodes: Mapping[str, Standing], node: str) -> Member:
    standing = nodes[node]
    if not isinstance(standing, Ready):
        raise TypeError(f"{node} is no spare")
    return standing.member
