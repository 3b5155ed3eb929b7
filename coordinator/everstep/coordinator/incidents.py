"""What an incident is: clues in order of time, the root among them, and what was decided."""

from __future__ import annotations

from typing import Literal

import msgspec

ClueKind = Literal[
    "lost",  # a node, by the rules of silence
    "launcher",  # a launcher ended without a word
    "left",  # a launcher took its leave
    "evicted",  # by an operator
    "absent",  # a member did not start its ranks in time
    "crash",  # a rank died of a signal that its own code earns: SIGSEGV, SIGABRT, ...
    "killed",  # a rank died of a signal that somebody sends: SIGKILL, SIGTERM, ...
    "error",  # a rank failed with an error of its own
    "exit",  # a rank ended with a code and no word about why
    "unknown",  # a rank ended, nobody knows how
    "broken",  # a rank failed because its connection to another one broke
    "stopped",  # a rank was stopped after another one on its node had ended
    "hang",  # all ranks stand still
    "silent",  # an agent is not heard
    "finding",  # a plugin or a rank reported something
    "note",
]
Role = Literal["root", "cascade", "confirmation", "candidate"]
Layer = Literal["user", "software", "gpu", "network", "storage", "host", "scheduler", "unknown"]
IncidentKind = Literal["failure", "hang", "silence", "systemic", "operator"]
What = Literal["none", "restart", "swap", "shrink", "evict", "stop", "wait"]
Status = Literal["done", "would", "pending"]

MAX_CLUES = 64
MAX_ERROR_CHARS = 16_384


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One observed fact. `at_s` is by the coordinator's clock, give or take `error_s`."""

    at_s: float
    kind: ClueKind
    node: str
    what: str
    error_s: float = 0.0
    rank: int | None = None
    role: Role = "candidate"
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The culprit; `layer` "unknown" when the clues do not name one."""

    layer: Layer
    category: str
    summary: str
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about it. `would`: in mode observe; `pending`: waits for `approve`."""

    what: What
    why: str
    status: Status = "done"
    node: str | None = None
    evicted: list[str] = []
    exit_code: int | None = None


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One failure and all that followed from it.

    `clues` are in order of time; of ranks that failed as a consequence no more than MAX_CLUES are
    kept, the journal has them all. `witnesses` are the nodes of such ranks.
    """

    id: int
    kind: IncidentKind
    detected_at_s: float
    job: str | None = None
    node: str | None = None
    generation: int = 0
    root: Root | None = None
    clues: list[Clue] = []
    witnesses: list[str] = []
    decision: Decision = Decision(what="none", why="")
    next_generation: int | None = None
    committed_at_s: float | None = None
    resumed_at_s: float | None = None
    closed_at_s: float | None = None
    steps_lost: int | None = None
