"""One case from first save to verdict: two generations of ranks with a fault between them."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.snapshots import damage, judge, strikes
from tests.chaos.snapshots.cases import (
    AFTER,
    FIRST,
    SECOND,
    Case,
    Kind,
)
from tests.chaos.snapshots.judge import CORRUPT, LOST, OTHER, Answer, Verdict
from tests.chaos.snapshots.scene import Scene
from tests.chaos.snapshots.stage import (
    Child,
    RankChild,
    until,
)

from everstep.snapshots.writer.child import END
from everstep.wire.ids import SnapshotId

_REJECTED = re.compile(r"(\S+) cannot be used from (\w+) by rank")


class SkippedError(Exception):
    """This machine does not let the case be done, and why."""


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    verdict: Verdict
    hit: bool = False
    took_s: float = 0.0
    skipped: str = ""

    @property
    def good(self) -> bool:
        return not self.verdict.wrong


def conduct(case: Case, folder: Path, short: Path, agents: tuple[Path, Path]) -> Outcome:
    """Do a case, and say what was wrong; its logs and snapshots stay in `folder`."""
    begin_s = time.monotonic()
    outcome = Outcome(case, Verdict())
    scene = Scene(case, folder, short, agents)
    try:
        with mounted(scene):
            first_generation(scene)
            second_generation(scene, outcome)
    except SkippedError as exc:
        outcome.skipped = str(exc)
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
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(scene.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"no file system of its own: {done.stderr.strip()}")
    try:
        yield
    finally:
        scene.end()
        subprocess.run(["umount", "-l", scene.run_dir], check=True)


def first_generation(scene: Scene) -> None:
    """Save twice in peace, then meet the fault; nobody of the ranks is left."""
    case = scene.case
    faults = strikes.planned(case)
    scene.start_writers(case.world if case.apart else 1, faults)
    scene.ranks = scene.start_ranks(case.world, generation=1, resume=())
    for step in (FIRST, SECOND):
        scene.save(step)
        scene.settle(step)
    for rank in range(case.world):
        until(lambda r=rank: len(scene.in_memory(r)) == 2, "the agent's hold of both slots")  # type: ignore[misc]
    strikes.strike(scene)
    scene.kill_ranks()
    scene.writers = {n: writer for n, writer in scene.writers.items() if writer.alive}
    scene.moved |= {r for r in case.moved if case.kind is not Kind.FLIP_MEMORY}


def second_generation(scene: Scene, outcome: Outcome) -> None:
    """Come up again, look at what was loaded, save once more, and look at all that is there."""
    case, verdict = scene.case, outcome.verdict
    if case.kind is Kind.FULL_DISK:
        damage.make_room(scene.place.parent)
    if case.kind is Kind.FLIP_MEMORY:
        strikes.flip_memory(scene)
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
        writer.send(END)
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
        writer.send(END)
        ended.append((writer, writer.wait()))
    for one, code in ended:
        if code:
            verdict.say(OTHER, f"process {one.pid} ended with {code}: {one.log}")
