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
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from everstep.launch.crew import Crew
from everstep.launch.environment import of_everstep
from everstep.launch.leave import leave, say
from everstep.launch.seat import Leave, Parked, Seat, Train
from everstep.launch.stores import GenerationStores, PlanStore
from everstep.launch.terms import Terms, read_terms
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
    Refused,
    StoreBound,
    StoreFailed,
)

if TYPE_CHECKING:
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
        self._crew: Crew | None = None
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
        crew = self._start_once()
        if crew.clear():
            # They were done just before a newer plan came, and torchrun looked at the plan first.
            self._finish(self._seat.last)
            self._leave(DONE, "done", None)
        self._seat.training = 0
        said = ""
        while True:
            match self._seat.order():
                case Train(plan, group_rank):
                    return self._take_seat(plan, group_rank, crew)
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

    def _start_once(self) -> Crew:
        if self._crew is None:
            self._link.start()
            self._await_agent()
            self._crew = Crew(self._seat, self._link.post)
            self._listen_for_signals(self._crew)
        return self._crew

    def _await_agent(self) -> None:
        if not self._link.wait_connected(AGENT_WAIT_S):
            leave(
                UNAVAILABLE,
                f"no agent answers on {self._terms.socket} ({self._link.last_error}); start "
                "one with `everstep agent` (one machine: `everstep agent --with-coordinator`)",
            )

    def _listen_for_signals(self, crew: Crew) -> None:
        # torchrun's handlers raise in the main thread and then wait 30 s for the ranks. The wakeup
        # descriptor tells our own thread of the signal without replacing any handler.
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def wait_for_signal() -> None:
            known = False
            while number := os.read(reader, 1):
                if number[0] not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                    continue
                if known:
                    crew.signalled_again()
                    continue
                known = True
                crew.signalled()
                if number[0] == signal.SIGTERM:
                    crew.save(lambda: self._say_leaving("SIGTERM"))

        threading.Thread(target=wait_for_signal, name="everstep-signals", daemon=True).start()

    def _say_leaving(self, why: str) -> None:
        """Let the others go on without us, while our writer finishes."""
        code = 128 + signal.SIGTERM
        self._link.post(Leaving(nonce=self._seat.nonce, exit_code=code, why=why))

    def _take_seat(self, plan: Plan, group_rank: int, crew: Crew) -> RendezvousInfo:
        os.environ.update(self._enter(plan, group_rank, crew))
        self._seat.take(plan.generation)
        crew.expect(plan, group_rank, _elastic_agent())
        return RendezvousInfo(
            PlanStore(plan, lambda: self._finish(self._seat.last)),
            group_rank,
            len(plan.members),
            RendezvousStoreInfo(plan.store_address, plan.store_port),
        )

    def _enter(self, plan: Plan, group_rank: int, crew: Crew) -> dict[str, str]:
        """Leave what was before, say where it goes on, and return everstep's own variables."""
        self._stores.close_before(plan.generation)
        resume = f"resume from {plan.resume[0]}" if plan.resume else "no snapshot of this job yet"
        say(
            f"{plan.run_id}: generation {plan.generation}, node {group_rank + 1} of "
            f"{len(plan.members)}, {resume} ({plan.why})"
        )
        ours = of_everstep(plan, self._terms, self._seat.node or "", crew.token)
        return ours | crew.environment

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
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()
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
                self._committed(plan)
            case JobOver():
                self._seat.job_over(message)
                self._stop_outdated()
            case Refused(why=why, exit_code=code):
                self._refused(why, code)
            case _:
                pass  # Welcome, Link: the link's own business

    def _committed(self, plan: Plan) -> None:
        here = next((i for i, m in enumerate(plan.members) if m.node == self._seat.node), None)
        crew = self._crew
        if not self._seat.is_news(plan):
            return
        moves = here is not None and crew is not None and crew.reserve()
        self._seat.committed(plan, in_place=moves)
        if moves and crew is not None and here is not None:
            crew.move(plan, here, self._enter(plan, here, crew))
        else:
            self._stop_outdated()

    def _refused(self, why: str, code: int) -> None:
        """Leave, unless ranks are training: they do not depend on what the monitor forgot."""
        if self._seat.training:
            say(f"the coordinator refuses this job while it trains, so it trains on: {why}")
        self._seat.refuse(Leave(code, why))

    def _stop_outdated(self) -> None:
        if self._crew is not None and self._seat.training and self._seat.outdated:
            self._crew.superseded()

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
