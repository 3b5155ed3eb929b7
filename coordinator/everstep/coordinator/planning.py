"""From "another generation is needed" to a plan in force: propose, bind, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import cases, ending, facts, mtbf, reckoning, resuming, timing
from everstep.coordinator.incidents import Clue, Decision
from everstep.coordinator.job import Proposal
from everstep.coordinator.membership import Away, Choice, Form, Ready, Standing, Wait, choose
from everstep.wire.exit_codes import UNAVAILABLE
from everstep.wire.messages import BindStore, Committed, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.coordinator.books import Replan
    from everstep.coordinator.incidents import Incident, What
    from everstep.coordinator.job import Job
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import StoreBound

_NOBODY_BINDS_S = 1.0


def ask(turn: Turn, job: Job, why: str, *, asked_by: str, incident: Incident | None = None) -> None:
    """Ask for another generation; a failure's reason replaces a lesser one."""
    replan = job.book.replan
    if job.book.over is not None or (
        replan is not None and (replan.incident is not None or incident is None)
    ):
        return
    job.proposal = None  # what was proposed did not know of this
    turn.record(
        facts.ReplanAsked(
            at_s=turn.now_s,
            job=job.book.id,
            generation=job.book.generation,
            why=why,
            asked_by=asked_by,
            incident=incident.id if incident else None,
        )
    )
    timing.put_down(turn, job)


def watch(turn: Turn, job: Job, silent: Sequence[str]) -> None:
    """Look whether the plan in force gets started, and take the job on. Called by the clock.

    `silent` are the members that are not heard.
    """
    if job.book.over is None and job.proposal is None and job.book.replan is None:
        _watch_start(turn, job, silent)
    advance(turn, job)


def advance(turn: Turn, job: Job) -> None:
    """Take the job as far as it gets now. Called after whatever concerns its membership."""
    if job.book.over is not None:
        return
    if job.proposal is not None:
        _watch_binding(turn, job)
    if job.proposal is not None:
        return
    replan = job.book.replan
    if replan is None or turn.now_s < job.hold_until_s or not reckoning.settled(turn, job):
        return
    if job.book.over is None and turn.now_s >= job.hold_until_s:
        _plan(turn, job, replan)


# ------------------------------------------------------------------------------------ propose


def _plan(turn: Turn, job: Job, replan: Replan) -> None:
    here, needed = len(job.attached), job.book.spec.min_nodes
    in_time = turn.now_s - replan.since_s < job.book.spec.join_timeout_s
    if job.book.generation == 0 and here < needed and in_time:
        _wait(turn, job, f"{here} of at least {needed} nodes are here")
        return  # the cheap look at a job that gathers
    standings = job.standings(turn.now_s)
    if _still_gathering(job, standings, turn.now_s):
        return
    match _choose(job, standings, turn.now_s):
        case Form() as form:
            job.waiting = ""
            _propose(turn, job, form)
        case Wait() as wait:
            _wait(turn, job, wait.why)
            _give_up_when_due(turn, job, wait, replan)


def _wait(turn: Turn, job: Job, why: str) -> None:
    job.waiting = why
    if job.book.awaited_at_s is None:
        turn.record(facts.NodesAwaited(at_s=turn.now_s, job=job.book.id, why=why))


def _choose(job: Job, standings: dict[str, Standing], now_s: float) -> Choice:
    book = job.book
    previous = [m for m in book.members if m not in book.done] if book.plan else []
    limits = (book.spec.min_nodes, book.spec.max_nodes)
    if book.finishing:
        limits = (1, max(1, len(previous)))
    choice = choose(previous, standings, at_least=limits[0], at_most=limits[1], now_s=now_s)
    if isinstance(choice, Form):
        # Who could not bind the store goes to the end, so that another one tries.
        members = tuple(sorted(choice.members, key=lambda m: m.node in job.unbound))
        return Form(members, choice.spares)
    return choice


def _still_gathering(job: Job, standings: dict[str, Standing], now_s: float) -> bool:
    seats = job.present()
    heard = all(s.node in job.attached for s in seats if s.node not in job.book.done)
    if not heard and now_s < job.since_s + job.config.silence.start_grace_s:
        return True  # this coordinator has just started, and they are about to reconnect
    ready = sum(isinstance(s, Ready) for s in standings.values())
    if job.book.plan is not None or ready >= job.book.spec.max_nodes:
        return False
    return now_s < job.joined_s + job.config.settle_s


def _give_up_when_due(turn: Turn, job: Job, wait: Wait, replan: Replan) -> None:
    limit_s = job.book.spec.join_timeout_s
    if wait.until_s is not None or turn.now_s - replan.since_s < limit_s:
        return
    if job.book.finishing and any(s.final for s in job.book.snapshots.values()):
        why = "a node finished and the final snapshot is whole; the others are gone"
        ending.end(turn, job, "done", 0, why)
        return
    why = f"{wait.why} after {limit_s:g} s (join_timeout_s); {_who_is_missing(job, turn.now_s)}"
    ending.end(turn, job, "failed", UNAVAILABLE, why)


def _who_is_missing(job: Job, now_s: float) -> str:
    missing = [
        f"{node}: {standing.why}"
        for node, standing in job.standings(now_s).items()
        if not isinstance(standing, Ready)
    ]
    return "; ".join(missing) or "nobody else ever joined: start it on more nodes or lower --nnodes"


def _propose(turn: Turn, job: Job, form: Form) -> None:
    generation = job.book.proposed + 1
    job.proposal = Proposal(generation, form.members, form.spares, turn.now_s + job.config.bind_s)
    members = [m.node for m in form.members]
    turn.record(
        facts.GenerationProposed(
            at_s=turn.now_s, job=job.book.id, generation=generation, members=members
        )
    )
    job.tell(turn, members[0], BindStore(nonce=job.book.id, generation=generation))


# --------------------------------------------------------------------------------------- bind


def bound(turn: Turn, job: Job, node: str, bind: StoreBound) -> None:
    """The first member's store listens: put the plan in force."""
    proposal = job.proposal
    if proposal is None or (bind.generation, node) != (proposal.generation, proposal.first):
        return  # of a proposal that was given up
    if _ready(job, proposal, turn.now_s):
        _commit(turn, job, proposal, bind)
    else:
        job.proposal = None
        advance(turn, job)


def unbound(turn: Turn, job: Job, node: str, generation: int) -> None:
    """The first member cannot bind the store: another one tries, under the next number."""
    proposal = job.proposal
    if proposal is None or (generation, node) != (proposal.generation, proposal.first):
        return
    _next_first(turn, job, proposal)
    advance(turn, job)


def _watch_binding(turn: Turn, job: Job) -> None:
    proposal = job.proposal
    if proposal is None:
        return
    if not _ready(job, proposal, turn.now_s):
        job.proposal = None
    elif turn.now_s >= proposal.deadline_s:
        _next_first(turn, job, proposal)


def _next_first(turn: Turn, job: Job, proposal: Proposal) -> None:
    job.proposal = None
    job.unbound.append(proposal.first)
    if len(job.unbound) >= len(proposal.members):
        job.unbound.clear()
        job.hold_until_s = turn.now_s + _NOBODY_BINDS_S


def _ready(job: Job, proposal: Proposal, now_s: float) -> bool:
    standings = job.standings(now_s)
    return all(isinstance(standings.get(m.node), Ready) for m in proposal.members)


# ------------------------------------------------------------------------------------- commit


def _commit(turn: Turn, job: Job, proposal: Proposal, bind: StoreBound) -> None:
    book, replan = job.book, job.book.replan
    before = list(book.members)
    plan = Plan(
        job=book.id,
        run_id=book.spec.run_id,
        generation=proposal.generation,
        epoch=turn.books.epoch,
        members=list(proposal.members),
        spares=list(proposal.spares),
        evicted=job.evicted(),
        store_address=bind.address,
        store_port=bind.port,
        resume=resuming.named(job, proposal.members),
        asked_by=replan.asked_by if replan else "",
        why=replan.why if replan else "",
        mtbf_s=mtbf.of_job(book, nodes=len(proposal.members), now_s=turn.now_s, config=job.config),
    )
    timing.put_down(turn, job)
    turn.record(facts.PlanCommitted(at_s=turn.now_s, job=book.id, plan=plan))
    job.proposal, job.ready_to_grow_s = None, None
    job.unbound.clear()
    job.hearsay.clear()
    job.came_up = {(g, node) for g, node in job.came_up if g >= plan.generation}
    for node in list(job.attached):
        job.tell(turn, node, Committed(plan=plan))
    if replan is not None and replan.incident is not None:
        _note_commit(turn, job, turn.books.incidents[replan.incident], before)


def _note_commit(turn: Turn, job: Job, incident: Incident, before: list[str]) -> None:
    incident = cases.rewrite(
        turn, incident, next_generation=job.book.generation, committed_at_s=turn.now_s
    )
    if incident.decision.what not in ("evict", "stop") and incident.kind != "systemic":
        what, why = _difference(before, job.book.members)
        cases.decide(turn, incident, Decision(what=what, why=why))


def _difference(before: list[str], after: list[str]) -> tuple[What, str]:
    came = [n for n in after if n not in before]
    went = [n for n in before if n not in after]
    if went and came:
        return "swap", f"{', '.join(came)} in place of {', '.join(went)}"
    if went:
        return "shrink", f"without {', '.join(went)}"
    return "restart", "same nodes, new ranks"


# -------------------------------------------------------------------------- the plan in force


def _watch_start(turn: Turn, job: Job, silent: Sequence[str]) -> None:
    """Leave out a member that holds up the start: it is absent, nobody accuses it."""
    book = job.book
    if book.plan is None:
        return
    all_started = len(book.started) >= len(book.members)
    for node in silent if all_started else book.members:
        why = _held_up_by(job, node, turn.now_s)
        if why is not None:
            _leave_out(turn, job, node, why)
            return


def _held_up_by(job: Job, node: str, now_s: float) -> str | None:
    book, config = job.book, job.config
    if node in book.done:
        return None
    away_s = job.nodes.away_since(node, now_s)
    if node in book.started:
        # Its ranks may be well. Once one of them was seen it gets much longer before it costs the
        # others what they have done of their first step.
        seen = (book.generation, node) in job.came_up
        limit_s = config.early_absent_s if seen else config.absent_s
        long = away_s is not None and now_s - away_s >= limit_s
        return "its agent is not heard" if long and job.waits_for_first_step(now_s) else None
    standing = job.standing(book.seats[node], now_s)
    if isinstance(standing, Away):  # out of the next plan, and back as soon as it is heard
        return "its agent is not heard" if now_s >= standing.until_s else None
    if now_s - book.committed_at_s > book.spec.join_timeout_s:
        job.stuck.add(node)  # heard all the time: out until its launcher joins anew
        return "it is late"
    return None


def _leave_out(turn: Turn, job: Job, node: str, why: str) -> None:
    what = f"{node} holds up the start of generation {job.book.generation}: {why}"
    clue = Clue(at_s=turn.now_s, kind="absent", node=node, what=what)
    incident = cases.add_clue(turn, job, clue)
    ask(turn, job, what, asked_by="membership", incident=incident)


def consider_growth(turn: Turn, job: Job, *, at_snapshot: bool) -> None:
    """Take waiting spares in while there is room, where it costs the least: at a snapshot."""
    if not _may_grow(job, turn.now_s):
        job.ready_to_grow_s = None
        return
    if job.ready_to_grow_s is None:
        job.ready_to_grow_s = turn.now_s
    if at_snapshot or turn.now_s - job.ready_to_grow_s >= job.config.grow_wait_s:
        ask(turn, job, "a node is there and there is room for it", asked_by="membership")
        advance(turn, job)


def _may_grow(job: Job, now_s: float) -> bool:
    book = job.book
    room = book.plan is not None and len(book.members) < book.spec.max_nodes
    if not room or book.over is not None or book.replan is not None or book.finishing:
        return False
    if now_s - book.committed_at_s < job.config.grow_settle_s:
        return False
    if len(book.started) < len(book.members):
        return False
    members = set(book.members)
    return any(
        isinstance(standing, Ready) and node not in members
        for node, standing in job.standings(now_s).items()
    )
