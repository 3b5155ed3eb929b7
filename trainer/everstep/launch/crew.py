"""The ranks of one launcher, from their start by torchrun through any number of generations."""

from __future__ import annotations

import os
import shutil
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from everstep.launch import emergency, environment, logs
from everstep.launch.control import VARIABLE, ControlServer, in_place_wanted
from everstep.launch.leave import say
from everstep.launch.ranks import Ended, Ranks, Started, as_ended, child_end
from everstep.launch.reforming import Reforming
from everstep.launch.warm.opening import close_pool, the_pool
from everstep.launch.writing import NodeWriter
from everstep.wire.folder import private_folder
from everstep.wire.messages import RankEnded, RanksStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from everstep.launch.control import FromRank, Line
    from everstep.launch.seat import Seat
    from everstep.launch.warm.rank import WarmRank
    from everstep.wire.messages import ClientMessage, Plan

_START_POLL_S = 0.02


class Crew:
    """Starts of ranks, their ends, and their way into the next generation.

    `post` sends to the coordinator. Its callbacks come from threads of its own.
    """

    def __init__(self, seat: Seat, post: Callable[[ClientMessage], None]) -> None:
        self._seat = seat
        self._post = post
        self._running: list[Started] = []
        self._first_rank: dict[int, int] = {}
        self._restarted = 0  # the generation that torchrun has started ranks for last
        self._logged = 0  # the generation whose streams the ranks write to
        self._signalled = self._saving = False
        grace_s = emergency.read_grace(say)
        self._ranks = Ranks(
            self._rank_ended,
            spares=self._spares,
            signal_grace_s=min(grace_s or emergency.GRACE_S, emergency.GRACE_S),
        )
        pool = the_pool()
        if pool is not None:
            self._ranks.take_along(pool.nurseries(), pool.folder)
        self._folder = private_folder("writer.sock")
        self._ranks.take_along([], self._folder)
        self._writer = NodeWriter(self._folder, say)
        in_place = in_place_wanted(os.environ)
        self._reforming = Reforming(pool, self, say) if in_place else None
        self._emergency = emergency.Emergency(grace_s, ending=self._ranks.ending)
        self._lines = ControlServer(self._folder / "control", self._heard)
        self._lines.start()

    @property
    def token(self) -> str:
        """Marks every process of this launcher."""
        return self._ranks.token

    @property
    def environment(self) -> dict[str, str]:
        """What a rank needs to reach us, and to be reached."""
        return self._writer.environment | {VARIABLE: str(self._lines.path)}

    def _heard(self, line: Line, message: FromRank | None) -> None:
        self._emergency.heard(line, message)
        if self._reforming is not None:
            self._reforming.heard(line, message)

    # ---- started by torchrun

    def expect(self, plan: Plan, group_rank: int, agent: Any) -> None:
        """Torchrun is about to start the ranks of this generation; `agent` is its own."""
        self._first_rank[plan.generation] = environment.first_rank(plan, group_rank)
        before = agent.get_worker_group().workers
        threading.Thread(
            target=self._await_start, args=(agent, before, plan), name="everstep-start", daemon=True
        ).start()

    def _await_start(self, agent: Any, before: list[Any], plan: Plan) -> None:
        """Find the pids once torchrun has started the ranks; `next_rendezvous` can't see them.

        `before` are the workers of the generation that ended: torchrun keeps them, pids and all,
        until some time after `next_rendezvous` has returned.
        """
        children: list[int] = []
        while not children:
            if self._seat.training != plan.generation:
                return
            time.sleep(_START_POLL_S)
            children = started_pids(agent.get_worker_group().workers, before)

        def returncode(local_rank: int) -> int | None:
            handlers = getattr(agent._pcontext, "subprocess_handlers", {})  # noqa: SLF001  torch's
            code: int | None = handlers[local_rank].proc.returncode if handlers else None
            return code

        running = [_started(pid, partial(returncode, i)) for i, pid in enumerate(children)]
        self._started(plan.generation, running)

    def _started(self, generation: int, running: list[Started]) -> None:
        self._running, self._restarted, self._logged = running, generation, generation
        if (pool := the_pool()) is not None:
            self._ranks.take_along(pool.nurseries())
        self._ranks.started(generation, running)
        if self._reforming is not None:
            self._reforming.started(generation, [rank.pid for rank in running])
        if self._seat.outdated:
            self._ranks.superseded()
        self._tell_started(generation)

    def _tell_started(self, generation: int) -> None:
        first = self._first_rank[generation]
        pids = [rank.pid for rank in self._running]
        ranks = [first + local_rank for local_rank in range(len(pids))]
        nonce = self._seat.nonce or ""
        self._post(RanksStarted(nonce=nonce, generation=generation, pids=pids, ranks=ranks))

    # ---- into the next generation without torchrun

    def reserve(self) -> bool:
        """Return whether the ranks that run can leave their generation in place; `move` follows."""
        running = 0 if self._signalled else self._seat.training
        return running > 0 and self._reforming is not None and self._reforming.reserve(running)

    def move(self, plan: Plan, group_rank: int, ours: dict[str, str]) -> None:
        """Take all local ranks into this generation; `ours` are everstep's own variables."""
        if self._reforming is None:
            raise AssertionError("asked for without reserve()")
        self._first_rank[plan.generation] = environment.first_rank(plan, group_rank)
        places = [
            environment.of_torchrun(plan, group_rank, local_rank) | ours
            for local_rank in range(len(self._running))
        ]
        self._reforming.join(plan.generation, places)

    def moved(self, generation: int, pids: Sequence[int]) -> None:
        """These processes, in order of local rank, are in the generation now."""
        before, pool = self._running, the_pool()
        warm = {} if pool is None else pool.ranks()
        self._running = [
            old if old.pid == pid else _behind(old.child, warm[local_rank])
            for local_rank, (old, pid) in enumerate(zip(before, pids, strict=True))
        ]
        fresh = [i for i, old in enumerate(before) if old is not self._running[i]]
        logs.carry_on(self._logged, generation, fresh)
        self._logged = generation
        self._ranks.moved(generation, self._running)
        self._tell_started(generation)

    def restart(self, why: str) -> None:
        """The ranks cannot go on in place: have torchrun restart them."""
        generation = self._seat.training
        if not generation:
            return
        say(f"the ranks cannot go on in place: {why}; torchrun restarts them")
        if generation != self._restarted:
            # They were about to join a generation that others join now without them.
            self._post(
                RankEnded(
                    nonce=self._seat.nonce or "",
                    generation=generation,
                    rank=self._first_rank[generation],
                    local_rank=0,
                    pid=0,
                    exit_code=None,
                    signal=None,
                    at_s=time.time(),
                    error=f"generation {generation} cannot be joined in place: {why}",
                )
            )
        self._ranks.end_now()

    def _spares(self, generation: int) -> bool:
        return self._reforming is not None and self._reforming.spares(generation)

    # ---- their end

    def superseded(self) -> None:
        """A newer plan is in force, or the job is over: these ranks must not go on."""
        if self._saving:
            return  # they end anyway, when they have saved what they have
        self._ranks.superseded()
        if self._reforming is not None:
            self._reforming.stop()

    def signalled(self) -> None:
        """The launcher was told to end; its ranks get torchrun's signal and a grace."""
        self._signalled = True
        self._ranks.signalled()
        if self._reforming is not None:
            self._reforming.stop()  # no shim waits for another rank behind it

    def signalled_again(self) -> None:
        """Somebody means it: end at once. What the writer has begun it finishes by itself."""
        self._emergency.abort()
        self._ranks.end_now()

    def save(self, saved: Callable[[], None]) -> None:
        """Have the ranks take an emergency snapshot, where they can.

        Does not wait, but this process stays until the writer has finished or the grace is over.
        `saved` is called when the ranks are no longer needed.
        """
        if asked := self._emergency.ask():
            self._saving = True
            say(
                f"SIGTERM: an emergency snapshot is asked of {asked} local rank(s), within "
                f"{self._emergency.grace_s:g} s"
            )
            threading.Thread(
                target=self._save,
                args=(asked, saved),
                name="everstep-emergency",
                daemon=False,
            ).start()

    def _save(self, asked: int, saved: Callable[[], None]) -> None:
        answers = self._emergency.wait()
        saved()
        begin = time.monotonic()
        late = ""
        if any(a.id for a in answers):
            done = self._writer.close(self._emergency.left_s())
            late = emergency.incomplete(answers) if done else "the grace was too short to write it"
        written_s = time.monotonic() - begin
        say(emergency.outcome(answers, asked, written_s=written_s, late=late))

    def clear(self) -> bool:
        """Forget the ranks that torchrun has stopped; return whether all had ended with 0."""
        return self._ranks.clear()

    def close(self) -> None:
        """Kill what is left, and end everything that watches it."""
        if self._reforming is not None:
            self._reforming.close()
        self._lines.close()
        close_pool()
        self._ranks.clear()
        self._writer.close()  # the ranks have ended, and their orders are all in
        self._ranks.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _rank_ended(self, generation: int, ended: Ended) -> None:
        if ended.exit_code == 0 or (self._reforming and self._reforming.absorbs(ended.pid)):
            return
        plan = self._seat.plan
        superseded = plan is None or plan.generation != generation
        evidence = logs.evidence(generation, ended.local_rank)
        self._post(
            RankEnded(
                nonce=self._seat.nonce or "",
                generation=generation,
                rank=self._first_rank[generation] + ended.local_rank,
                local_rank=ended.local_rank,
                pid=ended.pid,
                exit_code=ended.exit_code,
                signal=ended.signal,
                at_s=ended.at_s,
                expected=superseded or self._seat.outdated or self._signalled,
                error=evidence.error,
                stderr_tail=evidence.stderr_tail,
            )
        )


def _started(child: int, returncode: Callable[[], int | None]) -> Started:
    """Return the rank that torchrun's child is, or stands before."""
    pool = the_pool()
    rank = pool.behind(child) if pool is not None else None
    if rank is None:
        return Started(child, child, child_end(child, returncode))
    return _behind(child, rank)


def _behind(shim: int, rank: WarmRank) -> Started:
    return Started(rank.pid, shim, lambda: as_ended(rank.wait_end()))


def started_pids(workers: list[Any], before: list[Any]) -> list[int]:
    """Return the pids of torchrun's new workers, empty until all of them have been started."""
    ids = [worker.id for worker in workers]
    new = workers is not before and all(isinstance(pid, int) for pid in ids)
    return ids if new else []
