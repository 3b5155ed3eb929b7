"""torchrun's rendezvous, decided by the coordinator.

torchrun calls `next_rendezvous` when it needs ranks to run and `num_nodes_waiting` every 0.1 s
while they are healthy. Neither does any network I/O: the link's thread keeps `Seat` up to date.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from everstep.launch import logs
from everstep.launch.leave import leave, say
from everstep.launch.ranks import Ended, Ranks, Started, as_ended, child_end
from everstep.launch.seat import Leave, Parked, Seat, Train
from everstep.launch.stores import GenerationStores, PlanStore
from everstep.launch.terms import Terms, read_terms
from everstep.launch.warm.opening import close_pool, the_pool
from everstep.wire.exit_codes import DONE, UNAVAILABLE
from everstep.wire.link import AgentLink
from everstep.wire.messages import (
    BindStore,
    Committed,
    GroupSucceeded,
    Hello,
    JobOver,
    Join,
    Joined,
    Leaving,
    RankEnded,
    RanksStarted,
    Refused,
    StoreBound,
    StoreFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from everstep.wire.messages import AgentMessage, ClientMessage, Plan

AGENT_WAIT_S = 10.0
FINISH_ALONE_S = 300.0
_START_POLL_S = 0.02


def create(params: RendezvousParameters) -> EverstepRendezvous:
    """Make the handler for what torchrun was started with."""
    return EverstepRendezvous(read_terms(params))


class EverstepRendezvous(RendezvousHandler):
    """One launcher's end of the job; see the module's words for who calls what."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._seat = Seat(terms.on_evict)
        self._stores = GenerationStores()
        self._ranks: Ranks | None = None
        self._first_rank: dict[int, int] = {}
        self._link = AgentLink(
            terms.socket,
            Hello(role="launcher", version=version("everstep")),
            on_message=self._take,
            greeting=lambda: [self._join()],
        )

    # ---- what torchrun asks

    def get_backend(self) -> str:
        """Return the name after --rdzv-backend."""
        return "everstep"

    def get_run_id(self) -> str:
        """Return the name after --rdzv-id."""
        return self._terms.run_id

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the store that the first member's launcher serves."""
        return True

    def is_closed(self) -> bool:
        """Only the coordinator closes a job."""
        return False

    def set_closed(self) -> None:
        """Only the coordinator closes a job."""

    def num_nodes_waiting(self) -> int:
        """Return 1 when the ranks run under a plan that is no longer in force."""
        return int(self._seat.outdated)

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until a plan names this node, and return this node's place in it.

        Leaves (SystemExit) when the job is over, was refused, or evicted this node for good.
        """
        ranks = self._start_once()
        if ranks.clear():
            # They were done just before a newer plan came, and torchrun looked at the plan first.
            self._finish(self._seat.last)
            self._leave(DONE, "done", None)
        self._seat.training = 0
        said = ""
        while True:
            match self._seat.order():
                case Train(plan, group_rank):
                    return self._take_seat(plan, group_rank, ranks)
                case Leave(code, why, error):
                    self._leave(code, why, error)
                case Parked(why):
                    if why != said:
                        say(why)
                        said = why
                    self._seat.wait()

    def shutdown(self) -> bool:
        """Say goodbye and stop everything of ours; torchrun calls it on the way out."""
        self._link.send(Leaving(nonce=self._seat.nonce, exit_code=0, why="torchrun ends"))
        self._close()
        return True

    # ---- taking part

    def _start_once(self) -> Ranks:
        if self._ranks is None:
            self._link.start()
            self._await_agent()
            self._ranks = Ranks(self._rank_ended)
            if (pool := the_pool()) is not None:
                self._ranks.take_along(pool.nurseries(), pool.folder)
            self._listen_for_signals(self._ranks)
        return self._ranks

    def _await_agent(self) -> None:
        if not self._link.wait_connected(AGENT_WAIT_S):
            leave(
                UNAVAILABLE,
                f"no agent answers on {self._terms.socket} ({self._link.last_error}); start "
                "one with `everstep agent` (one machine: `everstep agent --with-coordinator`)",
            )

    def _listen_for_signals(self, ranks: Ranks) -> None:
        # torchrun's handlers raise in the main thread and then wait 30 s for the ranks. The wakeup
        # descriptor tells our own thread of the signal without replacing any handler.
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def wait_for_signal() -> None:
            while number := os.read(reader, 1):
                if number[0] in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                    ranks.signalled()

        threading.Thread(target=wait_for_signal, name="everstep-signals", daemon=True).start()

    def _take_seat(self, plan: Plan, group_rank: int, ranks: Ranks) -> RendezvousInfo:
        self._stores.close_before(plan.generation)
        os.environ.update(_rank_environment(plan, self._terms, self._seat.node or "", ranks.token))
        self._seat.take(plan.generation)
        self._first_rank[plan.generation] = _first_rank(plan, group_rank)
        resume = f"resume from {plan.resume[0]}" if plan.resume else "no snapshot of this job yet"
        say(
            f"{plan.run_id}: generation {plan.generation}, node {group_rank + 1} of "
            f"{len(plan.members)}, {resume} ({plan.why})"
        )
        agent: Any = _elastic_agent()
        before = agent.get_worker_group().workers
        threading.Thread(
            target=self._await_start,
            args=(agent, before, plan, ranks),
            name="everstep-start",
            daemon=True,
        ).start()
        return RendezvousInfo(
            PlanStore(plan, lambda: self._finish(plan.generation)),
            group_rank,
            len(plan.members),
            RendezvousStoreInfo(plan.store_address, plan.store_port),
        )

    def _await_start(self, agent: Any, before: list[Any], plan: Plan, ranks: Ranks) -> None:
        """Find the pids once torchrun has started the ranks; `next_rendezvous` can't see them.

        `before` are the workers of the generation that ended: torchrun keeps them, pids and all,
        until some time after `next_rendezvous` has returned.
        """
        pids: list[int] = []
        while not pids:
            if self._seat.training != plan.generation:
                return
            time.sleep(_START_POLL_S)
            pids = started_pids(agent.get_worker_group().workers, before)

        def returncode(local_rank: int) -> int | None:
            handlers = getattr(agent._pcontext, "subprocess_handlers", {})  # noqa: SLF001  torch's
            code: int | None = handlers[local_rank].proc.returncode if handlers else None
            return code

        started = [_started(pid, partial(returncode, i)) for i, pid in enumerate(pids)]
        if (pool := the_pool()) is not None:
            ranks.take_along(pool.nurseries())
        ranks.started(plan.generation, started)
        if self._seat.outdated:
            ranks.superseded()
        first = self._first_rank[plan.generation]
        self._link.post(
            RanksStarted(
                nonce=plan.job,
                generation=plan.generation,
                pids=[rank.pid for rank in started],
                ranks=[first + i for i in range(len(pids))],
            )
        )

    def _rank_ended(self, generation: int, ended: Ended) -> None:
        if ended.exit_code == 0:
            return
        plan = self._seat.plan
        superseded = plan is None or plan.generation != generation
        evidence = logs.evidence(generation, ended.local_rank)
        self._link.post(
            RankEnded(
                nonce=self._seat.nonce or "",
                generation=generation,
                rank=self._first_rank[generation] + ended.local_rank,
                local_rank=ended.local_rank,
                pid=ended.pid,
                exit_code=ended.exit_code,
                signal=ended.signal,
                at_s=ended.at_s,
                expected=superseded or self._seat.outdated,
                error=evidence.error,
                stderr_tail=evidence.stderr_tail,
            )
        )

    def _finish(self, generation: int) -> None:
        """Wait, at torchrun's exit barrier, until the whole job is over."""
        self._seat.succeeded = True
        self._link.post(GroupSucceeded(nonce=self._seat.nonce or "", generation=generation))
        last_up = time.monotonic()
        while True:
            match self._seat.refused or self._seat.order():
                case Leave(0, why, _):
                    say(why)
                    return
                case Leave() as refusal if refusal is self._seat.refused:
                    say(f"done here; the coordinator does not know this job: {refusal.why}")
                    return
                case Leave(code, why, error):
                    self._leave(code, why, error)
                case Train() | Parked():
                    pass
            if self._link.coordinator_up:
                last_up = time.monotonic()
            elif time.monotonic() - last_up > FINISH_ALONE_S:
                say(f"done here; the coordinator was not reached for {FINISH_ALONE_S:.0f} s")
                return
            self._seat.wait()

    def _leave(self, code: int, why: str, error: str | None) -> NoReturn:
        if error:
            sys.stderr.write(error.rstrip() + "\n")
        self._link.post(Leaving(nonce=self._seat.nonce, exit_code=code, why=why))
        self._close(flush_s=2.0)
        leave(code, why)

    def _close(self, flush_s: float = 0.0) -> None:
        self._link.close(flush_s=flush_s)
        close_pool()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.clear()
            ranks.close()
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
        self._stores.close()

    # ---- what the coordinator says (on the link's thread)

    def _join(self) -> ClientMessage:
        terms, seat = self._terms, self._seat
        return Join(
            run_id=terms.run_id,
            nonce=seat.nonce,
            min_nodes=terms.min_nodes,
            max_nodes=terms.max_nodes,
            local_world_size=terms.local_world_size,
            address=terms.local_address,
            join_timeout_s=terms.join_timeout_s,
            on_evict=terms.on_evict,
            running_generation=seat.training,
            succeeded=seat.succeeded,
            command=terms.command,
            torch_version=str(torch.__version__),
        )

    def _take(self, message: AgentMessage) -> None:
        match message:
            case Joined(nonce=nonce, node=node, address=address):
                self._seat.joined(nonce, node, address)
            case BindStore():
                self._bind(message)
            case Committed(plan=plan):
                if self._seat.committed(plan):
                    self._stop_outdated()
            case JobOver():
                self._seat.job_over(message)
                self._stop_outdated()
            case Refused(why=why, exit_code=code):
                self._refused(why, code)
            case _:
                pass  # Welcome, Link: the link's own business

    def _refused(self, why: str, code: int) -> None:
        """Leave, unless ranks are training: they do not depend on what the monitor forgot."""
        if self._seat.training:
            say(f"the coordinator refuses this job while it trains, so it trains on: {why}")
        self._seat.refuse(Leave(code, why))

    def _stop_outdated(self) -> None:
        if self._ranks is not None and self._seat.training and self._seat.outdated:
            self._ranks.superseded()

    def _bind(self, order: BindStore) -> None:
        address = self._terms.local_address or self._seat.address
        try:
            where, port = self._stores.bind(order.generation, address)
        except (OSError, RuntimeError) as exc:
            why = f"cannot listen on {address or 'any address'}: {exc}"
            self._link.send(StoreFailed(nonce=order.nonce, generation=order.generation, why=why))
            return
        self._link.send(
            StoreBound(nonce=order.nonce, generation=order.generation, address=where, port=port)
        )


def _started(child: int, returncode: Callable[[], int | None]) -> Started:
    """Return the rank that torchrun's child is, or stands before."""
    pool = the_pool()
    rank = pool.behind(child) if pool is not None else None
    if rank is None:
        return Started(child, child, child_end(child, returncode))
    return Started(rank.pid, child, lambda: as_ended(rank.wait_end()))


def started_pids(workers: list[Any], before: list[Any]) -> list[int]:
    """Return the pids of torchrun's new workers, empty until all of them have been started."""
    ids = [worker.id for worker in workers]
    new = workers is not before and all(isinstance(pid, int) for pid in ids)
    return ids if new else []


def _first_rank(plan: Plan, group_rank: int) -> int:
    return sum(member.local_world_size for member in plan.members[:group_rank])


def _rank_environment(plan: Plan, terms: Terms, node: str, token: str) -> dict[str, str]:
    """Return how a rank learns its place; torchrun hands the launcher's environment on."""
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


def _elastic_agent() -> Any:
    """Return torchrun's own agent: the `self` of the `_rendezvous` that called us.

    Its worker group is where the pids of the ranks appear; torch hands them to nobody.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  see above
    while frame is not None:
        if frame.f_code.co_name == "_rendezvous":
            return frame.f_locals["self"]
        frame = frame.f_back
    raise RuntimeError(
        "next_rendezvous was not called by torchrun's elastic agent; supported is torch 2.13's"
    )
