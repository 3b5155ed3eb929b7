"""One case from first save to verdict: two generations of ranks with a fault between them."""

from __future__ import annotations

import contextlib
import math
import random
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.snapshots import damage, judge
from tests.chaos.snapshots.cases import (
    AFTER,
    FIRST,
    HIT,
    KEEP,
    LATER,
    OF_A_PART,
    SECOND,
    Case,
    Kind,
)
from tests.chaos.snapshots.judge import CORRUPT, LOST, OTHER, Answer, Truth, Verdict
from tests.chaos.snapshots.rank import Brief
from tests.chaos.snapshots.stage import (
    Child,
    RankChild,
    StageError,
    start_rank,
    start_writer,
    until,
)

from everstep.coordinator.resuming import Piece
from everstep.snapshots import catalogue
from everstep.trainer.place import Seat
from everstep.wire.ids import SnapshotId

_REJECTED = re.compile(r"(\S+) cannot be used from (\w+) by rank")


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    verdict: Verdict
    hit: bool = False
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.verdict.wrong


@dataclass
class Scene:
    """What a case has started: the first generation, its writers, and where everything lies."""

    case: Case
    folder: Path
    short: Path
    agents: tuple[Path, Path]
    writers: dict[int, Child] = field(default_factory=dict)
    ranks: list[RankChild] = field(default_factory=list)
    old: list[Child] = field(default_factory=list)
    spoilt: set[SnapshotId] = field(default_factory=set)
    flipped: set[tuple[int, SnapshotId]] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    hit: bool = False

    def __post_init__(self) -> None:
        self.rng = self.case.rng()
        self.run_dir = self.folder / "run"
        self.place = self.run_dir / "snapshots"
        self.run_dir.mkdir(parents=True)
        self.job = f"chaos-{self.folder.name}-{self.short.name}"

    # ------------------------------------------------------------------------- processes

    def writer_of(self, rank: int) -> int:
        return rank if self.case.apart else 0

    def start_writers(self, count: int, faults: Sequence[str] = ()) -> None:
        """Start those that do not run."""
        for number in range(count):
            fault = faults[number] if number < len(faults) else ""
            if number not in self.writers or not self.writers[number].alive:
                self.writers[number] = self._writer(number, fault)

    def _writer(self, number: int, fault: str) -> Child:
        path = self.short / f"w{number}"
        return start_writer(path, self.folder / f"writer-{number}.log", fault)

    def start_ranks(
        self, world: int, *, generation: int, resume: Sequence[SnapshotId] | None
    ) -> list[RankChild]:
        made = []
        for rank in range(world):
            seat = Seat(
                rank=rank,
                world_size=world,
                local_rank=rank,
                local_world_size=world,
                job=self.job,
                generation=generation,
                resume=None if resume is None else tuple(resume),
                socket=self.agents[rank in self.moved],
                writer=self.short / f"w{self.writer_of(rank)}",
            )
            brief = Brief(
                seed=self.case.seed,
                numbers=self.case.numbers,
                own=self.case.own,
                keep=KEEP,
                run_dir=str(self.run_dir),
                seat=seat,
            )
            made.append(start_rank(brief, self.folder / f"rank-{rank}-g{generation}.log"))
        for child in made:
            self._await(child, lambda c=child: c.told("ready"), "its start")  # type: ignore[misc]
        return made

    def _await(self, child: Child, true: Callable[[], object], what: str) -> None:
        until(lambda: true() or not child.alive, f"{what}, of process {child.pid}: {child.log}")
        if not true():
            raise StageError(f"{what}: process {child.pid} has ended ({child.code}): {child.log}")

    def kill_ranks(self) -> None:
        for child in self.ranks:
            child.end()
            child.hang_up()

    def end(self) -> None:
        """Leave nothing behind."""
        for child in (*self.ranks, *self.writers.values(), *self.old):
            child.end()
        for rank in self.ranks:
            rank.hang_up()

    # ---------------------------------------------------------------------------- saving

    def save(self, step: int, *, disk: bool = True, races: bool = False) -> None:
        for child in self.ranks:
            child.say("save", step=step, disk=disk, races=races)

    def settle(self, step: int, generation: int = 1) -> None:
        """Wait until a save is whole, in memory and on disk. Raises StageError when it fails."""
        id_ = str(SnapshotId(step, generation))
        for child in self.ranks:
            self._await(child, lambda c=child: c.told("held", id=id_), f"{id_} in memory")  # type: ignore[misc]
            self._await(child, lambda c=child: c.told("part", id=id_), f"{id_} on disk")  # type: ignore[misc]
        lead = self.ranks[0]
        self._await(lead, lambda: lead.told("done", id=id_), f"{id_} committed")
        if why := lead.told("done", id=id_)[0]["why"]:
            raise StageError(f"{id_} was not committed: {why}")

    def answered(self, step: int) -> bool:
        """Say whether all that is to be heard of a save has been."""
        id_ = str(SnapshotId(step, 1))
        there = [c for c in self.ranks if c.alive]
        if not all(c.told("taken", step=step) and c.told("part", id=id_) for c in there):
            return False
        # With a part missing the lead goes on waiting, for as long as its deadline allows.
        everybody = len(there) == len(self.ranks) and all(w.alive for w in self.writers.values())
        return not everybody or bool(self.ranks[0].told("done", id=id_))

    def wait_answered(self, step: int) -> None:
        until(lambda: self.answered(step), f"answers to step {step}")

    # ----------------------------------------------------------------------------- truth

    def committed(self) -> list[SnapshotId]:
        said = [e["id"] for e in self.ranks[0].told("done", why=None)]
        return sorted(map(SnapshotId.parse, said))

    def held(self) -> dict[int, list[Piece]]:
        return {
            c.rank: [Piece(SnapshotId.parse(e["id"]), e["replicated"]) for e in c.told("held")]
            for c in self.ranks
        }

    def on_disk(self) -> frozenset[SnapshotId]:
        return frozenset(e.id for e in catalogue.entries(self.place) if e.committed)

    def damaged(self) -> frozenset[SnapshotId]:
        return frozenset(i for i in self.spoilt if not damage.is_whole(self.place / str(i)))

    def in_memory(self, rank: int) -> frozenset[SnapshotId]:
        return damage.sealed_ids(self.agents[rank in self.moved], self.job, rank)

    def truth(self, in_memory: dict[int, frozenset[SnapshotId]], said: judge.Truth | None) -> Truth:
        return Truth(
            committed=said.committed if said else self.committed(),
            held=said.held if said else self.held(),
            on_disk=self.on_disk(),
            in_memory=in_memory,
            damaged=self.damaged(),
            flipped=frozenset(self.flipped),
            replicated=not (self.case.own and self.case.world > 1),
            world=self.case.world,
            world_after=self.case.world_after,
        )


# ---------------------------------------------------------------------------- the faults


def planned(case: Case, action: str) -> list[str]:
    """Return the fault of each writer: one of them has it."""
    rng = case.rng()
    fault = f"{case.point}:{action}#{case.nth(rng)}"
    count = case.world if case.apart else 1
    whose = rng.randrange(count) if case.point in OF_A_PART else 0
    return [fault if number == whose else "" for number in range(count)]


def action(case: Case) -> str:
    """Return what the writers are told to do wrong, nothing where all goes wrong from outside."""
    match case.kind:
        case Kind.KILL_WRITER_AT_POINT:
            return "kill"
        case Kind.ENOSPC | Kind.EIO:
            return str(case.kind)
        case Kind.SLOW_DISK:
            return f"sleep={case.rng().uniform(0.1, 0.5):.2f}"
        case Kind.KILL_RANK_AT_POINT | Kind.DELETE_FOLDER | Kind.THAWED_WRITER | Kind.FULL_DISK:
            return "stop"
        case Kind.TRUNCATE | Kind.FLIP:
            return "stop" if case.hurry else ""
        case _:
            return ""


def strike(scene: Scene) -> None:
    """Take the snapshot to hit, and hit it."""
    case = scene.case
    scene.save(HIT, races=case.races)
    strike_at_once(scene)
    if case.in_memory_too and all(c.alive for c in scene.ranks):
        scene.wait_answered(HIT)
        scene.save(LATER, disk=False)
        for child in scene.ranks:
            until(lambda c=child: c.told("taken", step=LATER), f"step {LATER}: {child.log}")  # type: ignore[misc]
    if not case.hurry:
        scene.wait_answered(HIT)


def strike_at_once(scene: Scene) -> None:
    """Do something while it is under way."""
    rng = scene.rng
    match scene.case.kind:
        case Kind.KILL_WRITER_AT_POINT:
            until(lambda: not all(w.alive for w in scene.writers.values()), "the writer's end")
            scene.hit = True
        case Kind.KILL_WRITER:
            time.sleep(soon(rng))
            scene.hit = not scene.answered(HIT)
            rng.choice([*scene.writers.values()]).end()
        case Kind.KILL_RANK:
            time.sleep(soon(rng))
            scene.hit = not scene.answered(HIT)
            kill_some(scene)
        case Kind.LOSE_NODE:
            time.sleep(soon(rng))
            scene.hit = not scene.answered(HIT)
            lose_node(scene)
        case Kind.ENOSPC | Kind.EIO:
            scene.wait_answered(HIT)
            scene.hit = True
        case Kind.SLOW_DISK:
            scene.hit = True
        case Kind.FLIP_MEMORY:
            scene.settle(HIT)
        case _:
            strike_standing(scene)


def strike_standing(scene: Scene) -> None:
    """Do something while the writer stands at the point, or when it has passed all of them."""
    case = scene.case
    if not action(case):
        scene.settle(HIT)
    else:
        until(
            lambda: any(w.alive and w.stopped for w in scene.writers.values()),
            f"stop at {case.point}",
        )
    scene.hit = True
    match case.kind:
        case Kind.KILL_RANK_AT_POINT:
            kill_some(scene)
        case Kind.TRUNCATE | Kind.FLIP:
            spoil_file(scene)
        case Kind.DELETE_FOLDER:
            delete(scene)
        case Kind.FULL_DISK:
            damage.fill(scene.place.parent)
        case _:
            for child in scene.ranks:
                child.end()
            # Its path will be another's: it is on a machine that was cut off, and comes back.
            stopped = [number for number, writer in scene.writers.items() if writer.stopped]
            scene.old = [scene.writers.pop(number) for number in stopped]
            return
    for writer in scene.writers.values():
        writer.send(signal.SIGCONT)


def soon(rng: random.Random) -> float:
    """Return how long into a save it is, in seconds: 0.3 to 40 ms, the early ones more often."""
    return float(math.exp(rng.uniform(math.log(0.0003), math.log(0.04))))


def kill_some(scene: Scene) -> None:
    everybody = scene.rng.random() < 0.4
    for child in scene.ranks if everybody else [scene.rng.choice(scene.ranks)]:
        child.end()


def lose_node(scene: Scene) -> None:
    """SIGKILL a node's ranks and writer; its memory goes with it."""
    victim = scene.rng.randrange(len(scene.writers))
    scene.writers.pop(victim).end()
    for child in scene.ranks:
        if scene.writer_of(child.rank) == victim:
            child.end()
            scene.moved.add(child.rank)


def spoil_file(scene: Scene) -> None:
    """Cut a file short, or turn a bit of it over."""
    ids = scene.on_disk() or {SnapshotId(HIT, 1)}
    flying = SnapshotId(HIT, 1)
    id_ = flying if action(scene.case) else scene.rng.choice(sorted(ids)[-2:])
    damage.spoil(scene.place / str(id_), scene.rng, cut=scene.case.kind is Kind.TRUNCATE)
    scene.spoilt.add(id_)


def delete(scene: Scene) -> None:
    """Delete the snapshot in flight, the one before, or all."""
    which = scene.rng.choice(("hit", "second", "all"))
    ids = {"hit": {HIT}, "second": {SECOND}, "all": {FIRST, SECOND, HIT}}[which]
    scene.spoilt |= {SnapshotId(step, 1) for step in ids}
    for step in ids:
        shutil.rmtree(scene.place / str(SnapshotId(step, 1)), ignore_errors=True)
    if which == "all":
        shutil.rmtree(scene.place, ignore_errors=True)


# ------------------------------------------------------------------------------- the case


def conduct(case: Case, folder: Path, short: Path, agents: tuple[Path, Path]) -> Outcome:
    """Do a case, and say what was wrong; its logs and snapshots stay in `folder`."""
    begin_s = time.monotonic()
    outcome = Outcome(case, Verdict())
    scene = Scene(case, folder, short, agents)
    try:
        with mounted(scene):
            first_generation(scene)
            second_generation(scene, outcome)
    except Exception as exc:  # noqa: BLE001  one case is not to end the others
        outcome.verdict.say(OTHER, f"{type(exc).__name__}: {exc}")
        (folder / "traceback.log").write_text(traceback.format_exc())
    finally:
        scene.end()
    outcome.hit, outcome.took_s = scene.hit, time.monotonic() - begin_s
    return outcome


@contextlib.contextmanager
def mounted(scene: Scene) -> Iterator[None]:
    """Have the run on a file system of its own where that is to be filled."""
    if scene.case.kind is not Kind.FULL_DISK:
        yield
        return
    parts = 2 if not scene.case.own else 2 * scene.case.world
    size = 6 * parts * 2 * 4 * scene.case.numbers + 32 * 1024 * 1024
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", scene.run_dir], check=True
    )
    try:
        yield
    finally:
        scene.end()
        subprocess.run(["umount", "-l", scene.run_dir], check=True)


def first_generation(scene: Scene) -> None:
    """Save twice in peace, then meet the fault; nobody of the ranks is left."""
    case = scene.case
    faults = planned(case, action(case)) if action(case) else []
    scene.start_writers(case.world if case.apart else 1, faults)
    scene.ranks = scene.start_ranks(case.world, generation=1, resume=())
    for step in (FIRST, SECOND):
        scene.save(step)
        scene.settle(step)
    for rank in range(case.world):
        until(lambda r=rank: len(scene.in_memory(r)) == 2, "the agent's hold of both slots")  # type: ignore[misc]
    strike(scene)
    scene.kill_ranks()
    scene.writers = {n: writer for n, writer in scene.writers.items() if writer.alive}
    scene.moved |= {r for r in case.moved if case.kind is not Kind.FLIP_MEMORY}


def second_generation(scene: Scene, outcome: Outcome) -> None:
    """Come up again, look at what was loaded, save once more, and look at all that is there."""
    case, verdict = scene.case, outcome.verdict
    if case.kind is Kind.FULL_DISK:
        damage.make_room(scene.place.parent)
    if case.kind is Kind.FLIP_MEMORY:
        flip_memory(scene)
    in_memory = {r: scene.in_memory(r) for r in range(case.world_after)}
    before = scene.truth(in_memory, None)
    judge.keeps_what_was_said(before, sorted(scene.moved), verdict)
    resume = judge.plan(before, sorted(scene.moved)) if case.planned else None

    scene.start_writers(case.world_after if case.apart else 1)
    scene.ranks = scene.start_ranks(case.world_after, generation=2, resume=resume)
    for child in scene.ranks:
        child.say("restore")
    for child in scene.ranks:
        until(lambda c=child: c.told("restored") or not c.alive, f"a resume: {child.log}")  # type: ignore[misc]
    after = scene.truth(in_memory, before)
    certain = judge.newest_first(before.on_disk) if resume is None else resume
    possible = judge.newest_first(before.on_disk | after.on_disk) if resume is None else resume
    if possible:
        answers = [answer(child) for child in scene.ranks]
        judge.resumes_rightly(before, after, (certain, possible), answers, verdict)
    scene.save(AFTER)
    scene.settle(AFTER, 2)
    thaw(scene)
    look_at_all(scene, verdict)
    close(scene, verdict)


def flip_memory(scene: Scene) -> None:
    """Turn a bit over in the newest slot of one rank, or of all."""
    ranks = range(scene.case.world)
    for rank in ranks if scene.rng.random() < 0.4 else [scene.rng.choice(ranks)]:
        id_ = max(scene.in_memory(rank))
        damage.flip_slot(scene.agents[0], scene.job, rank, id_, scene.rng)
        scene.flipped.add((rank, id_))
    scene.hit = True


def answer(child: RankChild) -> Answer:
    """Return what a rank has loaded."""
    findings = [e["summary"] for e in child.told("finding", name="snapshot.rejected")]
    matches = [m for text in findings if (m := _REJECTED.match(text))]
    rejected = frozenset((m[1], m[2]) for m in matches)
    (said,) = child.told("restored") or [{"id": None}]
    if said["id"] is None:
        return Answer(None, rejected=rejected)
    return Answer(SnapshotId.parse(said["id"]), said["tier"], said["wrong"], rejected)


def thaw(scene: Scene) -> None:
    """Let an old writer go on where it stood; it ends when it has finished."""
    for writer in scene.old:
        writer.send(signal.SIGCONT)
        writer.send(signal.SIGTERM)
        writer.wait()


def look_at_all(scene: Scene, verdict: Verdict) -> None:
    """Read everything that is on disk."""
    lead = scene.ranks[0]
    lead.say("read_all")
    until(lambda: lead.told("read") or not lead.alive, f"all that is on disk: {lead.log}")
    (said,) = lead.told("read")
    for id_, wrong in said["read"].items():
        damaged = SnapshotId.parse(id_) in scene.damaged()
        if wrong:
            verdict.say(CORRUPT, f"{id_} was read from disk, with another {wrong}")
        if wrong is None and not damaged:
            verdict.say(LOST, f"{id_} on disk cannot be read")
    newest = str(SnapshotId(AFTER, 2))
    if newest not in said["read"]:
        verdict.say(LOST, f"{newest} was committed, and is not there any more")
    if (scene.place / "latest").readlink().name != newest:
        verdict.say(OTHER, f"`latest` does not name {newest}")


def close(scene: Scene, verdict: Verdict) -> None:
    """End everybody, as a job that is done."""
    for child in scene.ranks:
        child.say("close")
    ended: list[tuple[Child, int]] = [(child, child.wait()) for child in scene.ranks]
    for writer in scene.writers.values():
        writer.send(signal.SIGTERM)
        ended.append((writer, writer.wait()))
    for one, code in ended:
        if code:
            verdict.say(OTHER, f"process {one.pid} ended with {code}: {one.log}")
