"""The faults: what is done to the third save, or to what it has left."""

from __future__ import annotations

import math
import random
import shutil
import signal
import time

from tests.chaos.snapshots import damage
from tests.chaos.snapshots.cases import FIRST, HIT, LATER, OF_A_PART, SECOND, Case, Kind
from tests.chaos.snapshots.scene import Scene
from tests.chaos.snapshots.stage import until

from everstep.wire.ids import SnapshotId


def planned(case: Case) -> list[str]:
    """Return the fault of each writer: one of them has it, where there is one."""
    if not action(case):
        return []
    rng = case.rng()
    fault = f"{case.point}:{action(case)}#{case.nth(rng)}"
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


def flip_memory(scene: Scene) -> None:
    """Turn a bit over in the newest slot of one rank, or of all."""
    ranks = range(scene.case.world)
    for rank in ranks if scene.rng.random() < 0.4 else [scene.rng.choice(ranks)]:
        id_ = max(scene.in_memory(rank))
        damage.flip_slot(scene.agents[0], scene.job, rank, id_, scene.rng)
        scene.flipped.add((rank, id_))
    scene.hit = True
