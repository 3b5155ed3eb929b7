"""From clues to a culprit: root causes before cascades, by time where time can tell.

Pure. Two clues closer than their clocks' error bounds are unordered; then what they are decides.
"""

from __future__ import annotations

import re
import signal as signals
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from everstep.coordinator.incidents import Clue, ClueKind, Layer, Role, Root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.coordinator.facts import FailureKind
    from everstep.wire.messages import RankEnded

_CRASHES = frozenset(
    getattr(signals, f"SIG{name}") for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "SYS", "TRAP")
)

# What torch's communication says when the far end went away. Python's own ConnectionResetError is
# not here: a data loader's killed worker ends in one.
_BROKEN = re.compile(
    r"gloo/transport|connectFullMesh|Connection (closed|reset) by peer \["
    r"|ncclRemoteError|ncclSystemError|remote process exited|communicator was aborted"
    r"|Watchdog caught collective operation timeout|\bDist(Network|Store|Backend)Error\b"
    r"|Timed out after \d+ seconds waiting for clients|recvValue failed|sendBytes failed"
    r"|[Ss]ocket [Tt]imeout|[Ww]ait timeout after|has timed out after \d+ms while trying to connect"
)
_NOT_BROKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use|gai error|CUDA error")
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]:\s?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))\b"
)
_GLOG = re.compile(r"^(?:\[rank\d+\]:)?\s*\[?[WEIF]\d{4}[ \d]")

# Of clues that time cannot order, the one nearer to the hardware is the cause.
_RANKING: tuple[ClueKind, ...] = (
    "lost", "launcher", "left", "evicted", "absent", "crash", "killed", "error", "exit", "unknown",
    "hang",
)  # fmt: skip
_EXPLAINING: frozenset[ClueKind] = frozenset(
    {"lost", "launcher", "left", "evicted", "absent", "crash", "killed", "error"}
)
_CASCADES: frozenset[ClueKind] = frozenset({"broken", "stopped"})
_CONFIRMATIONS: frozenset[ClueKind] = frozenset({"finding", "silent", "note"})
_FAILURES: dict[ClueKind, FailureKind] = {
    "lost": "lost", "evicted": "lost", "absent": "left", "launcher": "left", "left": "left",
    "crash": "crash", "killed": "killed", "error": "error", "exit": "error", "hang": "hang",
}  # fmt: skip
_LAYERS: dict[ClueKind, Layer] = {
    "lost": "host", "launcher": "host", "left": "scheduler", "absent": "host", "crash": "software",
    "killed": "scheduler", "error": "user", "exit": "user",
}  # fmt: skip


class Verdict(NamedTuple):
    """The clues with their roles, oldest first, and what they come to."""

    clues: list[Clue]
    root: Root
    failure: FailureKind
    cause: str
    witnesses: list[str]


def kind_of_end(ended: RankEnded) -> ClueKind:
    """Return what a rank's end is a clue of, taken alone."""
    text = said_last(ended.error, ended.stderr_tail)
    broken = bool(_BROKEN.search(text)) and not _NOT_BROKEN.search(text)
    if ended.signal is not None and ended.signal not in _CRASHES:
        return "killed"
    if broken:
        return "broken"
    if ended.signal is not None:
        return "crash"
    if ended.exit_code is None:
        return "unknown"
    return "error" if text else "exit"


def said_last(error: str | None, tail: Sequence[str]) -> str:
    """Return a rank's last exception with its message, else everything that it said."""
    lines = (error or "\n".join(tail)).splitlines()
    own = [line for line in lines if not _GLOG.match(line)]
    for i in range(len(own) - 1, -1, -1):
        if _EXCEPTION.match(own[i]):
            return "\n".join(own[i:])
    return "\n".join(lines)


def exception_name(error: str | None) -> str | None:
    r"""Return the class of the last exception in a text.

    >>> exception_name("Traceback ...\n[rank2]: KeyError: 'input_ids'")
    'KeyError'
    """
    names = [m[1] for line in (error or "").splitlines() if (m := _EXCEPTION.match(line))]
    return names[-1].rpartition(".")[2] if names else None


def explained_elsewhere(clues: Sequence[Clue], node: str) -> bool:
    """Return whether something on another node explains that ranks failed, so `node` need not.

    A rank that ended with a code and without a word explains others only when these say that
    their connection broke: otherwise it may itself be a witness.
    """
    others = [c for c in assign_roles(clues) if c.node != node]
    if any(c.kind in _EXPLAINING for c in others):
        return True
    wordless = any(c.kind in ("exit", "unknown") for c in others)
    return wordless and any(c.kind == "broken" for c in others)


def assign_roles(clues: Sequence[Clue]) -> list[Clue]:
    """Return the clues oldest first, each with the part that it plays."""
    ordered = _stopped_with_siblings(sorted(clues, key=lambda c: (c.at_s, c.node, c.rank or 0)))
    root = _root(ordered)
    return [msgspec.structs.replace(c, role=_role(c, root)) for c in ordered]


def judge(clues: Sequence[Clue]) -> Verdict:
    """Return who is to blame. Without any cause of its own in the clues: nobody, "unknown"."""
    ordered = assign_roles(clues)
    root = next((c for c in ordered if c.role == "root"), None)
    witnesses = sorted({c.node for c in ordered if c.role == "cascade"})
    if root is None:
        unknown = Root(layer="unknown", category="unknown", summary=_without_root(ordered))
        return Verdict(ordered, unknown, "unknown", "unknown", witnesses)
    culprit = Root(
        layer=_LAYERS.get(root.kind, "unknown"),
        category=root.kind,
        summary=root.what,
        node=root.node or None,
        rank=root.rank,
        exit_code=root.exit_code,
        signal=root.signal,
        error=root.error,
    )
    return Verdict(ordered, culprit, _FAILURES.get(root.kind, "unknown"), _cause(root), witnesses)


def signal_name(number: int) -> str:
    """Return e.g. SIGKILL."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stopped_with_siblings(ordered: Sequence[Clue]) -> list[Clue]:
    """Mark the ranks that their launcher stopped because another one there had ended before."""
    ended: set[str] = set()
    out = []
    for clue in ordered:
        by_launcher = clue.signal in (signals.SIGTERM, signals.SIGKILL)
        if clue.kind == "killed" and by_launcher and clue.node in ended:
            out.append(msgspec.structs.replace(clue, kind="stopped"))
            continue
        if clue.rank is not None and clue.kind not in _CONFIRMATIONS:
            ended.add(clue.node)
        out.append(clue)
    return out


def _root(ordered: Sequence[Clue]) -> Clue | None:
    candidates = [c for c in ordered if c.kind in _RANKING]
    if not candidates:
        return None
    first = candidates[0]
    unordered = [c for c in candidates if not _before(first, c)]
    return min(unordered, key=lambda c: (_RANKING.index(c.kind), c.at_s))


def _before(a: Clue, b: Clue) -> bool:
    if a.node == b.node:  # one clock
        return a.at_s < b.at_s
    return a.at_s + a.error_s < b.at_s - b.error_s


def _role(clue: Clue, root: Clue | None) -> Role:
    if clue is root:
        return "root"
    if clue.kind in _CONFIRMATIONS:
        return "confirmation"
    return "cascade" if root is not None or clue.kind in _CASCADES else "candidate"


def _without_root(ordered: Sequence[Clue]) -> str:
    if not ordered:
        return "nothing is known"
    failed = [c for c in ordered if c.kind not in _CONFIRMATIONS]
    return f"cause unknown: {failed[0].what}" if failed else ordered[0].what


def _cause(root: Clue) -> str:
    match root.kind:
        case "error" | "exit":
            return f"{exception_name(root.error) or 'exit'}:{root.exit_code}"
        case "crash":
            return signal_name(root.signal or 0)
        case "killed":
            return f"{signal_name(root.signal or 0)}:rank {root.rank}"
        case kind:
            return f"{kind}:{root.node}"
