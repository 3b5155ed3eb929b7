"""When a node is lost, and when a job stands still. Pure.

Silence alone is never death: an agent may be stopped, restarted or cut off while its ranks train.
A silent node is lost only with a second witness that fits the moment it fell silent:

(a) a rank on another node ended or reported a broken connection, and nothing else explains it;
(b) every other rank of the job is in phase `step` and stands, and nothing else explains it.

An agent whose socket was closed says by that very close that its host is up, so there (b) does not
count. An old silence proves nothing about a new failure: the witness has to fall into the time
around the silence's beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.coordinator.verdict import explained_elsewhere
from everstep.wire.messages import Evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.coordinator.config import SilenceConfig
    from everstep.coordinator.incidents import Clue
    from everstep.wire.messages import RankProgress

_WITNESSES = frozenset({"broken", "exit", "unknown", "stopped"})
_HEARTBEAT_S = 1.0
_SLACK_S = 0.5
_GRACE_S = 0.2  # in which the report of another cause may still be on its way
_FRESH_S = 2.0


@dataclass(frozen=True, slots=True)
class SilentNode:
    """A member whose agent is not heard. `ranks` is what its last heartbeat said of this job.

    `since_s` is from when on its silence counts, `heard_at_s` when it was last heard: the same,
    unless this coordinator stood still itself. `pause_s` is how long it was silent between two
    heartbeats of late.
    `snapshot_patience_s` is how long a snapshot of this job may hold its loop up by all that is
    known of the ones before; None while there was none.
    """

    node: str
    since_s: float
    heard_at_s: float
    closed: bool
    ranks: tuple[RankProgress, ...] = ()
    pause_s: float = 1.0
    snapshot_patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's progress, from which node, and when the coordinator heard it."""

    node: str
    heard_at_s: float
    progress: RankProgress


@dataclass(frozen=True, slots=True)
class Loss:
    """A node is lost, with all that was seen, oldest first."""

    node: str
    why: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Standstill:
    """All ranks that can be seen stand. The culprit is named only when one is behind the rest."""

    why: str
    since_s: float
    node: str | None = None
    rank: int | None = None


def lost(
    silent: SilentNode,
    peers: Sequence[Seen],
    clues: Sequence[Clue],
    *,
    expected_peers: int,
    now_s: float,
    rules: SilenceConfig,
) -> Loss | None:
    """Return the loss of a silent node, None while nobody else bears witness.

    `peers` are the ranks on other nodes as last heard, `expected_peers` how many there are by the
    plan, `clues` what is known of this generation's failure so far.
    """
    if now_s - silent.since_s < rules.silent_s or explained_elsewhere(clues, silent.node):
        return None
    if any(c.node == silent.node and c.rank is not None for c in clues):
        return None  # its agent lived to tell of its ranks: that is another story, told already
    step_s = max((p.progress.p99_step_s or 0.0 for p in peers), default=0.0)
    witness = _ended_peer(silent, clues, step_s, now_s, rules)
    if witness is not None:
        how = "lost its connection" if witness.kind == "broken" else "ended"
        why = f"rank {witness.rank} on {witness.node} {how}"
        return _loss(silent, why, [_as_evidence(witness)])
    if silent.closed or len(peers) < expected_peers:
        return None
    return _standing_peers(silent, peers, step_s, now_s, rules)


def standstill(
    ranks: Sequence[Seen], *, expected: int, now_s: float, rules: SilenceConfig
) -> Standstill | None:
    """Return that a job stands still, None while any rank moves or may be expected to.

    In phase `step` a rank may stand as long as several of its own steps; other phases (a first
    step that compiles, a snapshot) get `stall_s`; with ranks that nobody sees, `blind_hang_s`.
    Where the kernel says that a signal has stopped one, that explains why the others wait for it.
    """
    fresh = [r for r in ranks if now_s - r.heard_at_s < _FRESH_S]
    if (stopped := _stopped(fresh, rules)) is not None:
        return stopped
    limit_s = rules.hang_s if len(fresh) >= expected else rules.blind_hang_s
    if not fresh or not all(_stuck(r.progress, limit_s, rules) for r in fresh):
        return None
    since_s = max(r.heard_at_s - r.progress.standing_s for r in fresh)
    return _behind(sorted(fresh, key=lambda r: r.progress.step), since_s)


def _stopped(ranks: Sequence[Seen], rules: SilenceConfig) -> Standstill | None:
    found = [r for r in ranks if r.progress.stopped]
    if not found or not all(_waits(r.progress, rules) for r in ranks):
        return None
    first = min(found, key=lambda r: r.progress.rank)
    since_s = first.heard_at_s - first.progress.standing_s
    why = f"rank {first.progress.rank} on {first.node} was stopped by a signal, and all ranks stand"
    return Standstill(why, since_s, first.node, first.progress.rank)


def _waits(progress: RankProgress, rules: SilenceConfig) -> bool:
    return progress.standing_s > rules.step_factor * (progress.p99_step_s or 0.0) and (
        progress.standing_s >= rules.standing_s
    )


def _behind(ranks: Sequence[Seen], since_s: float) -> Standstill:
    """Name the one rank that stands at an earlier step than all others, if there is one."""
    first, top = ranks[0], ranks[-1].progress.step
    why = f"all {len(ranks)} ranks stand at step {top}"
    if len(ranks) < 2 or first.progress.step == ranks[1].progress.step:
        return Standstill(why, since_s)
    rank, step = first.progress.rank, first.progress.step
    return Standstill(f"{why}, rank {rank} behind at {step}", since_s, first.node, rank)


def _stuck(progress: RankProgress, limit_s: float, rules: SilenceConfig) -> bool:
    return progress.standing_s > _patience_s(progress, limit_s, rules)


def _patience_s(progress: RankProgress, limit_s: float, rules: SilenceConfig) -> float:
    if progress.phase != "step":
        return rules.stall_s
    if progress.p99_step_s is None:  # nothing is known of its steps yet
        return max(limit_s, rules.blind_hang_s)
    return max(limit_s, rules.step_factor * progress.p99_step_s)


def _ended_peer(
    silent: SilentNode, clues: Sequence[Clue], step_s: float, now_s: float, rules: SilenceConfig
) -> Clue | None:
    """Return the first rank elsewhere that ended when the silence began, or soon after."""
    for clue in sorted(clues, key=lambda c: c.at_s):
        if clue.node == silent.node or clue.kind not in _WITNESSES:
            continue
        early = clue.at_s + clue.error_s < silent.heard_at_s - step_s - _SLACK_S
        late = clue.at_s - clue.error_s > silent.since_s + rules.witness_s
        if not early and not late and now_s - clue.at_s >= _GRACE_S:
            return clue
    return None


def _standing_peers(
    silent: SilentNode,
    peers: Sequence[Seen],
    step_s: float,
    now_s: float,
    rules: SilenceConfig,
) -> Loss | None:
    patience_s = _own_patience_s(silent)
    if not peers or patience_s is None or now_s - silent.since_s < patience_s:
        return None
    pause_s = min(max(silent.pause_s, _HEARTBEAT_S), rules.silent_s)
    earliest = silent.heard_at_s - step_s - _SLACK_S
    latest = silent.since_s + pause_s + step_s + _SLACK_S
    for peer in peers:
        if now_s - peer.heard_at_s > _FRESH_S or not _stands(peer.progress, rules):
            return None
        if not earliest <= peer.heard_at_s - peer.progress.standing_s <= latest:
            return None
    evidence = [
        Evidence(
            at_s=p.heard_at_s - p.progress.standing_s,
            what=f"rank {p.progress.rank} stands at step {p.progress.step}",
            source=p.node,
        )
        for p in peers[:8]
    ]
    return _loss(silent, f"all {len(peers)} other ranks stand", evidence)


def _own_patience_s(silent: SilentNode) -> float | None:
    """Return how long the others may be waiting for what the silent node itself was doing.

    None is "for ever": its first step, or a snapshot when nothing is known of how long they take.
    """
    phases = {r.phase for r in silent.ranks}
    if phases == {"step"}:
        return 0.0
    return silent.snapshot_patience_s if phases and phases <= {"step", "snapshot"} else None


def _stands(progress: RankProgress, rules: SilenceConfig) -> bool:
    if progress.phase != "step" or progress.p99_step_s is None:
        return False
    return progress.standing_s > max(rules.standing_s, rules.step_factor * progress.p99_step_s)


def _as_evidence(clue: Clue) -> Evidence:
    return Evidence(at_s=clue.at_s, what=clue.what, source=clue.node)


def _loss(silent: SilentNode, why: str, evidence: list[Evidence]) -> Loss:
    how = "closed its connection" if silent.closed else "was last heard"
    silence = Evidence(at_s=silent.heard_at_s, what=f"agent {how}", source="coordinator")
    seen = sorted([silence, *evidence], key=lambda e: e.at_s)
    return Loss(silent.node, f"{why}, and the agent of {silent.node} is silent", tuple(seen))
