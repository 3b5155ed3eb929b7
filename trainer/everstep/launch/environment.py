"""What a rank finds in its environment: its place in the plan, and the way to us."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.launch.terms import Terms
    from everstep.wire.messages import Plan


def first_rank(plan: Plan, group_rank: int) -> int:
    """Return the lowest rank of a member."""
    return sum(member.local_world_size for member in plan.members[:group_rank])


def of_everstep(plan: Plan, terms: Terms, node: str, token: str) -> dict[str, str]:
    """Return how a rank learns its generation; torchrun hands the launcher's environment on."""
    return {
        "EVERSTEP_SOCKET": str(terms.socket),
        "EVERSTEP_JOB": plan.job,
        "EVERSTEP_RUN_ID": plan.run_id,
        "EVERSTEP_GENERATION": str(plan.generation),
        "EVERSTEP_RESUME": ",".join(plan.resume),
        "EVERSTEP_SKIP": ",".join(f"{start}-{stop}" for start, stop in plan.skip_windows),
        "EVERSTEP_NODE": node,
        "EVERSTEP_MTBF_S": "" if plan.mtbf_s is None else f"{plan.mtbf_s:.0f}",
        "EVERSTEP_LAUNCH": f"{token}-g{plan.generation}",
    }


def of_torchrun(plan: Plan, group_rank: int, local_rank: int) -> dict[str, str]:
    """Return what torchrun itself would put there, where it is not asked to start the rank."""
    rank = first_rank(plan, group_rank) + local_rank
    world = sum(member.local_world_size for member in plan.members)
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(plan.members)),
        "MASTER_ADDR": plan.store_address,
        "MASTER_PORT": str(plan.store_port),
    }
