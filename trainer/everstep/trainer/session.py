"""One training process under everstep, whoever wrote the loop.

    with Session(SessionConfig(run_dir="runs/mine")) as session:
        model = session.wrap(model)
        session.snapshot_state({"model": model, "optimizer": optimizer})
        for step in session.steps(1000):
            loss = ...
            loss.backward()
            session.step(optimizer, loss=loss)

Without everstep around it, under plain torchrun or plain python, the same script works: nobody
watches, and it resumes from the newest good snapshot in its own folder.
"""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from everstep.sdk import ConfigFile, EverstepError
from everstep.sdk.hooks import Decision
from everstep.trainer import ledger, rng
from everstep.trainer.admission import admit_hooks, on_every_rank
from everstep.trainer.agree import Agreement, Vote
from everstep.trainer.boundary import Facts
from everstep.trainer.content import Content
from everstep.trainer.dispatch import Dispatch
from everstep.trainer.emergency import Emergency
from everstep.trainer.group import Groups, leave_without_groups
from everstep.trainer.keeper import Keeper
from everstep.trainer.launcher import Launcher
from everstep.trainer.order import take
from everstep.trainer.parallel import Models, accumulating
from everstep.trainer.place import Seat
from everstep.trainer.presence import Presence
from everstep.trainer.skips import Skips, TrainingStoppedError
from everstep.trainer.snapshot.wishes import Wishes
from everstep.trainer.step import Run, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn
    from torch.optim import Optimizer

    from everstep.trainer.agree import Agreed
    from everstep.trainer.config import SessionConfig
    from everstep.trainer.order import Range
    from everstep.trainer.orders import Orders
    from everstep.trainer.snapshot.state import State

log = logging.getLogger(__name__)

_TEARDOWN_S = 5.0
"""How long flushing to the agent, and taking the groups down, may each last at the end."""


class Session:
    """Page, link, hooks, agreement and snapshots of one rank; use it as a context manager."""

    def __init__(
        self,
        config: SessionConfig,
        file: ConfigFile | None = None,
        *,
        hooks: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
        orders: Orders | None = None,
    ) -> None:
        """Read the rank's place; nothing is opened yet.

        Hooks are configured by `file`, or by `hooks`, a mapping of their tables. `orders` is the
        line to the launcher, where there is one that outlives the session. Raises ConfigError for
        an environment that makes no sense.
        """
        self.config = config
        self.seat = Seat.from_environ(environ)
        self._file = file or ConfigFile(Path("Session(hooks=...)"), {"hooks": dict(hooks or {})})
        self._content = Content({}, rank=self.seat.rank)
        self._optimizer: Optimizer | None = None
        self._samples = self._samples_after = 0
        self._skip: list[Range] = list(self.seat.skip)
        self._skips = Skips(config.stop_after_skips)
        self._stall_s = 0.0
        self._launcher = Launcher(environ, orders)
        self._ledger: ledger.Writer | None = None

    # ------------------------------------------------------------------ opening and closing

    def __enter__(self) -> Self:
        """Form the group. Raises ConfigError for a hook's table that is wrong."""
        self._presence = Presence(self.seat)
        try:
            self._open()
        except BaseException:
            self._launcher.close()
            self._presence.close(flush_s=0.0)
            leave_without_groups()
            raise
        return self

    def _open(self) -> None:
        config, seat = self.config, self.seat
        torch.set_num_threads(config.threads)
        report = self._presence.report
        wishes = Wishes()
        offers = {"report": report, "page": self._presence, "snapshots": wishes, "clock": time.time}
        plugins = admit_hooks(self._file, offers)
        self._groups = Groups(seat, config)
        self._presence.mark("grouped_at_s")
        self.device = self._groups.device
        self._models = Models(config.data_parallel, self.device)
        self._dispatch = Dispatch(on_every_rank(plugins, report), report=report)
        run_dir = Path(config.run_dir)
        self._keeper = Keeper(run_dir, seat, config, self._groups, self._presence, wishes)
        self.run = Run(
            seat.rank, seat.world_size, self._keeper.generation, run_dir, mtbf_s=seat.mtbf_s
        )
        self._emergency = Emergency(self._launcher.orders, self._keeper, seat, self.device)
        self._agreement = Agreement(hooks=len(self._dispatch.hooks), device=self.device)
        self._step = Step(self._agreement, rank=seat.rank, world_size=seat.world_size)
        rng.seed(config.seed, step=0, rank=seat.rank)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Make the last snapshot durable, say goodbye and take the group down, in bounded time."""
        if kind is None:
            try:
                self._finish()
            except BaseException:
                self._abandon(flush_s=_TEARDOWN_S)
                raise
            self._leave()
        else:
            self._abandon(flush_s=_TEARDOWN_S if issubclass(kind, EverstepError) else 0.0)

    def _finish(self) -> None:
        """Write the last snapshot if it is wanted and not there yet."""
        done, self._emergency.ending = self.run.done, True
        self._presence.enter("snapshot", step=done)
        wanted = self._keeper.wishes.at_end and bool(self._content)
        self._keeper.finish(done, self._look, partial(self._take, final=True) if wanted else None)
        self._dispatch.fire("run_end", self.run)
        if self.seat.rank == 0:
            log.info("hooks took: %s", self._dispatch.cost())
        self._presence.enter("end", step=done)

    def _leave(self) -> None:
        self._launcher.leave(self._emergency)
        self._close_files(flush_s=_TEARDOWN_S)
        self._models.detach()
        self._keeper.close(_TEARDOWN_S)
        if not self._groups.close(_TEARDOWN_S):
            log.warning("the process group does not come down; leaving without it")
            leave_without_groups()

    def _abandon(self, *, flush_s: float) -> None:
        self._launcher.leave(self._emergency)
        # A group that lost a peer can stand for ever in its own teardown: it is not asked to.
        self._models.detach()
        self._keeper.abandon()
        self._close_files(flush_s=flush_s)
        leave_without_groups()

    def _close_files(self, *, flush_s: float) -> None:
        if self._ledger:
            self._ledger.close()
        self._presence.close(flush_s=flush_s)

    # ------------------------------------------------------------------------ before training

    def wrap(
        self,
        model: nn.Module,
        *,
        example: tuple[Any, ...] | None = None,
        blocks: Iterable[nn.Module] | None = None,
        ddp: Mapping[str, Any] | None = None,
        fsdp: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Return the model on this rank's device, spread over the ranks as the config says.

        Either way its sums survive a restart bit by bit. `example` are inputs for DDP's discarded
        pass, of any shape the model takes; without it the first real input is used. `blocks` are
        what FSDP shards one by one. `ddp` and `fsdp` are the options of either. Who spreads a
        model otherwise does not wrap it. Raises EverstepError when it cannot be done.
        """
        return self._models.wrap(model, example=example, blocks=blocks, ddp=ddp, fsdp=fsdp)

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Run forward and backward of a micro-batch in here; the `last` one reduces gradients."""
        return accumulating(model, last=last)

    def snapshot_state(self, objects: Mapping[str, Any]) -> int:
        """Say what snapshots hold, bring it back from the newest good one, return its step.

        Each object has `state_dict()` and `load_state_dict()`, and on all ranks the same state, or
        DTensors of it.
        Returns 0 at the very beginning. Raises SnapshotError when there are snapshots but none
        that is good on all ranks.
        """
        self._presence.enter("restore")
        self._content = Content(objects, rank=self.seat.rank)
        found = self._keeper.restore(self._content)
        if found is not None:
            hooks = self._content.apply(found, world_size=self.seat.world_size)
            self._dispatch.restore(hooks)
            self.run.done = found.marker.step
            self._samples = found.marker.samples
            self._skip = sorted({*self._skip, *found.marker.skip_windows})
        if self.config.ledger:
            begun_from = found.marker if found else None
            self._ledger = ledger.opened(self.run, self.seat, begun_from, at_s=time.time())
        if self._content and self._keeper.wishes.wanted:
            self._launcher.watch(self._emergency, self.run.done)
        return self.run.done

    # --------------------------------------------------------------------------- training

    def steps(self, total: int, *, batch: int = 0, warmup_steps: int = 0) -> Iterator[Step]:
        """Yield every step that is left up to number `total`; each must end with `step(...)`.

        `batch` is the number of samples per step over all ranks: `Step.indices` are then this
        rank's global sample indices, a pure function of the step whatever failed before.
        """
        self.run.steps, self.run.warmup_steps = total, warmup_steps
        self._presence.enter("first_step", step=self.run.done)
        self._dispatch.fire("run_start", self.run)
        self._step.lap()
        self._step.end()
        while self.run.done < total:
            number = self.run.done + 1
            self._begin(number, batch)
            yield self._step
            if self.run.done != number:
                raise EverstepError(f"step {number} was left without session.step(optimizer)")

    def loaded(self) -> None:
        """Mark: this rank's samples are in memory (optional; moment `batch`)."""
        self._step.data_s = self._step.lap()
        self._vote(self._dispatch.fire("batch", self._step))

    def forwarded(self, loss_sum: torch.Tensor, tokens: int, *, last: bool) -> None:
        """Mark: a micro-batch's forward is done. After the `last` one the loss is on its way."""
        step = self._step
        step.forward_s = step.lap(step.forward_s)
        self._agreement.add(loss_sum, tokens)
        if last:
            self._agreement.post()
            self._vote(self._dispatch.fire("forward", step))

    def backwarded(self, *, last: bool) -> None:
        """Mark: a micro-batch's backward is done; after the `last` one gradients are complete."""
        step = self._step
        step.backward_s = step.lap(step.backward_s)
        if last:
            self._vote(self._dispatch.fire("backward", step))

    def step(
        self, optimizer: Optimizer, *, loss: torch.Tensor | None = None, tokens: int = 1
    ) -> bool:
        """Ask the hooks, agree with all ranks, update or skip, record; True when it was applied.

        `loss` is this rank's mean over `tokens`, for loops that do not call `forwarded`. Gradients
        are cleared either way. Raises TrainingStoppedError, on all ranks alike.
        """
        step = self._step
        if loss is not None:
            self._agreement.add(loss.detach() * tokens, tokens)
            self._agreement.post()
            self._vote(self._dispatch.fire("forward", step))
            self._vote(self._dispatch.fire("backward", step))
        self._emergency.park()
        agreed = self._agree(optimizer)
        applied = agreed.decision is Decision.PROCEED
        with self._emergency.gate:
            if applied:
                optimizer.step()
                step.snapshot_s += self._keeper.engine.waited()
            optimizer.zero_grad(set_to_none=True)
            step.update_s = step.lap()
            step.end()
            self._record(agreed, applied=applied)
        self._emergency.park()
        return applied

    # --------------------------------------------------------------------- inside a step

    def _begin(self, number: int, batch: int) -> None:
        # What is drawn in a step depends on its number alone, so a rank whose own random states
        # are lost (it had none in memory, and another handed the rest on) still draws the same.
        rng.follow(self.config.seed, step=number, rank=self.seat.rank)
        samples, self._samples_after = take(self._samples, batch, self._skip)
        self._step.begin(number, last=number == self.run.steps, samples=samples)
        self._step.snapshot_s, self._stall_s = self._stall_s, 0.0

    def _vote(self, decision: Decision) -> None:
        self._step.decision = max(self._step.decision, decision)

    def _agree(self, optimizer: Optimizer) -> Agreed:
        step = self._step
        if optimizer is not self._optimizer:
            self._optimizer = optimizer
            step.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        # Waited for here and not in a hook, where a lost peer would look like the hook's fault.
        if not step.tokens:
            raise EverstepError(
                f"step {step.number}: session.step(optimizer) got no loss: pass loss=, or call "
                "session.forwarded(..., last=True) after the last forward"
            )
        if math.isnan(step.lr):
            step.lr = float(optimizer.param_groups[0]["lr"])
        wishes = self._keeper.wishes
        self._vote(self._dispatch.fire("before_update", step))
        vote = Vote(
            finite=step.finite,
            decision=step.decision,
            snapshot=wishes.asked,
            memory=wishes.asked_memory,
            # A rank that does not ask may be the one whose disk is slow.
            busy=self._keeper.engine.busy(disk=wishes.asked or not wishes.asked_memory),
            layout=bool(self._keeper.engine.misfit),
            failures=self._dispatch.failures(),
            emergency=self._emergency.asked,
        )
        wishes.answered()
        agreed = self._agreement.settle(vote)
        self._dispatch.settle(agreed.failures)
        step.decision = agreed.decision
        if agreed.decision is Decision.STOP:
            raise TrainingStoppedError(f"a hook stopped the run at step {step.number}")
        return agreed

    def _record(self, agreed: Agreed, *, applied: bool) -> None:
        step, run = self._step, self.run
        first = self._presence.phase == "first_step"
        run.done, self._samples = step.number, self._samples_after
        if self._ledger:
            loss = step.loss if math.isfinite(step.loss) else None
            self._ledger.add(ledger.Line(step.number, step.share, applied, time.time(), loss))
        # After the first step an optimizer has all its state, and nobody waits for this one.
        if self._content and (agreed.layout or (first and self._keeper.wishes.wanted)):
            self._keeper.lay_out(self._look)
        if first:
            self._presence.enter("step")
        self._dispatch.fire("after_update", step)
        self._presence.at_least(step.number)
        self._skips.count(run.done, applied=applied, finite=agreed.finite)
        if self._content:
            facts = Facts(run.done, self._samples, self._skip)
            self._emergency.stepped(facts, step.step_s, self._look)
            if agreed.snapshot or agreed.memory or agreed.emergency:
                self._snapshot(agreed)

    def _snapshot(self, agreed: Agreed) -> None:
        disk = agreed.snapshot or agreed.emergency
        waits = agreed.emergency or (disk and self._keeper.wishes.wait_when_busy)
        if agreed.busy and not waits:
            log.info("snapshot at step %d left out: one is in flight", self.run.done)
            return
        self._presence.enter("snapshot")
        begin = time.perf_counter()
        self._take(disk=disk, urgent_s=self._emergency.left_s if agreed.emergency else None)
        self._stall_s = time.perf_counter() - begin
        self._presence.enter("step")

    def _take(
        self, *, final: bool = False, disk: bool = True, urgent_s: float | None = None
    ) -> None:
        """Begin a snapshot of now."""
        if not self._keeper.engine.laid_out:
            self._keeper.lay_out(self._look)
        taken = self._keeper.take(
            self._look(),
            step=self.run.done,
            samples=self._samples,
            skip=self._skip,
            final=final,
            disk=disk,
            urgent_s=urgent_s,
        )
        if disk:
            self._emergency.taken(taken)
        self._dispatch.fire("snapshot", taken)

    def _look(self) -> State:
        return self._content.state(self._dispatch.state())
