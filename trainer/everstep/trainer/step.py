"""The step in progress, as the loop fills it and the hooks see it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.sdk.hooks import Decision
from everstep.trainer.order import expand, share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from everstep.trainer.agree import Agreement
    from everstep.trainer.order import Range

nan = math.nan


@dataclass
class Run:
    """Implements `everstep.sdk.hooks.Run`."""

    rank: int
    world_size: int
    generation: int
    run_dir: Path
    steps: int = 0
    done: int = 0
    warmup_steps: int = 0
    mtbf_s: float | None = None


class Step:
    """Implements `everstep.sdk.hooks.Step`; one object is reused for the whole run."""

    __slots__ = (
        "_agreement",
        "_grad_norm",
        "_loss",
        "_marked_s",
        "_tokens",
        "backward_s",
        "data_s",
        "decision",
        "forward_s",
        "last",
        "lr",
        "number",
        "parameters",
        "rank",
        "samples",
        "snapshot_s",
        "started_s",
        "step_s",
        "update_s",
        "world_size",
    )

    def __init__(self, agreement: Agreement, *, rank: int, world_size: int) -> None:
        self._agreement = agreement
        self.rank = rank
        self.world_size = world_size
        self.started_s = self._marked_s = time.perf_counter()
        self.parameters: Sequence[torch.Tensor] = ()
        self.begin(0, last=False, samples=())

    def begin(self, number: int, *, last: bool, samples: Sequence[Range]) -> None:
        """Forget the step before."""
        self.number = number
        self.last = last
        self.samples: Sequence[Range] = samples
        self.lr = nan
        self._grad_norm: float | None = None
        self.decision = Decision.PROCEED
        self.data_s = self.forward_s = self.backward_s = self.update_s = self.step_s = nan
        self.snapshot_s = 0.0
        self._loss: float | None = None
        self._tokens = 0

    @property
    def loss(self) -> float:
        """Mean per token over all ranks; nan until this rank's last forward is done."""
        if self._loss is None:
            loss, self._tokens = self._agreement.loss()
            if not self._tokens:
                return nan
            self._loss = loss
        return self._loss

    @property
    def tokens(self) -> int:
        """What the loss is a mean of, over all ranks."""
        self.loss  # noqa: B018  reading it waits for both
        return self._tokens

    @property
    def grad_norm(self) -> float:
        """Global norm before clipping; nan unless a hook has set it."""
        return nan if self._grad_norm is None else self._grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: float) -> None:
        self._grad_norm = norm

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm, as far as it is known, are numbers."""
        norm = self._grad_norm
        return math.isfinite(self.loss) and (norm is None or math.isfinite(norm))

    @property
    def share(self) -> list[Range]:
        """This rank's part of the samples."""
        return share(self.samples, self.rank, self.world_size)

    @property
    def indices(self) -> NDArray[np.int64]:
        """This rank's global sample indices."""
        return expand(self.share)

    def lap(self, so_far: float = 0.0) -> float:
        """Return the seconds since the last call, on top of those so far where there are any."""
        now = time.perf_counter()
        took, self._marked_s = now - self._marked_s, now
        return took if math.isnan(so_far) else so_far + took

    def end(self) -> None:
        """Take the time of the whole step."""
        self.step_s = self._marked_s - self.started_s
        self.started_s = self._marked_s
