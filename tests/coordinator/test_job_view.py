"""What `everstep jobs show` is told of a job."""

from __future__ import annotations

from tests.coordinator.world import World

from everstep.coordinator import views
from everstep.wire.messages import Finding, RankFinding


def found(world: World, number: int, summary: str) -> None:
    launcher, _ = world.rank(number)
    finding = Finding(
        name="snapshot.interval",
        component="job",
        severity="info",
        summary=summary,
        at_s=world.now_s,
    )
    message = RankFinding(nonce=world.job().id, rank=number, step=1, finding=finding)
    world.post(launcher, message)


def shown(world: World) -> list[str]:
    detail = views.job_detail(world.cluster, world.job(), world.now_s)
    return [finding["summary"] for finding in detail["findings"]]


def test_a_job_shows_the_newest_of_what_its_ranks_found_wherever_they_ran() -> None:
    world = World(list("ab"))
    world.launch_all(list("ab"), nnodes=(2, 2))
    world.until(world.training)
    assert shown(world) == []
    found(world, 0, "every 40 steps")
    world.run(1)
    found(world, 1, "every 55 steps")  # the first rank is on another node now
    assert shown(world) == ["every 55 steps"]
