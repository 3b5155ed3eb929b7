"""The trainer's tables in the one TOML file, and the arithmetic that its numbers must satisfy."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from everstep.sdk.config import ConfigError, ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

_DATA_PARALLEL = ("ddp", "fsdp")


def _positive(config: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise ValueError(f"{name} must be above 0, not {value}")


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every training process needs, whoever wrote its loop."""

    run_dir: str
    """Snapshots and ledger are kept below it; all nodes of a job must see the same folder."""
    seed: int = 0
    threads: int = 1
    """CPU threads of torch in each rank; another number sums in another order."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is one."""
    data_parallel: str = "ddp"
    """`ddp`: each rank has a copy of the model; `fsdp`: a shard of it and of its optimizer."""
    process_group_timeout_s: float = 600.0
    save_timeout_s: float = 1800.0
    """A snapshot that is not on disk after this long has failed."""
    ledger: bool = False
    """Put down which samples each update applied, one line a step and rank."""
    stop_after_skips: int = 50
    """So many updates skipped in a row end the run: it is going nowhere."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be meant."""
        _positive(self, "threads", "process_group_timeout_s", "save_timeout_s", "stop_after_skips")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device!r}")
        if self.data_parallel not in _DATA_PARALLEL:
            raise ValueError(f"data_parallel must be ddp or fsdp, not {self.data_parallel!r}")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small Llama-like decoder over bytes."""

    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    ffn_dim: int = 384
    vocabulary: int = 256
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        """Raise ValueError for shapes that do not fit together."""
        _positive(self, "dim", "layers", "heads", "kv_heads", "ffn_dim", "vocabulary", "rope_theta")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim {self.dim} must be an even multiple of heads {self.heads}: rotary embedding "
                "turns pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")


class TrainerConfig(SessionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[trainer]`: what our own loop trains, on what and how."""

    data: str
    """A file made by `everstep.trainer.prepare_bytes`."""
    steps: int
    global_batch: int = 12
    """Samples per update over all ranks; it stays the same whatever the world size."""
    micro_batch: int = 2
    seq_len: int = 128
    lr: float = 1e-3
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    min_step_s: float = 0.0
    """Each step takes at least this long: for demonstrations that need time for their faults."""
    model: ModelConfig = ModelConfig()

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be meant."""
        super().__post_init__()
        _positive(self, "steps", "global_batch", "micro_batch", "seq_len", "lr")
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of micro_batch "
                f"{self.micro_batch}"
            )
        if self.min_step_s < 0:
            raise ValueError("min_step_s must be 0 or more")
        if self.warmup_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("warmup_steps must be 0 or more and min_lr_ratio between 0 and 1")


def load(path: Path) -> tuple[TrainerConfig, ConfigFile]:
    """Read the file; its hooks' tables are validated where the hooks are made.

    Raises ConfigError that names file, table, key and what is allowed.
    """
    file = ConfigFile.load(path)
    for name, value in file.tables.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{file.where}: {name!r} stands outside any table, e.g. [trainer]")
    for table in ("trainer", "hooks"):
        _refuse_near_miss(file, table)
    return file.section("trainer", TrainerConfig), file


def _refuse_near_miss(file: ConfigFile, table: str) -> None:
    # The file may hold tables of other parts, so an unknown name is no error; a misspelt one is.
    for name in file.tables:
        if name != table and difflib.get_close_matches(name, [table], cutoff=0.75):
            raise ConfigError(f"{file.where}: [{name}]: did you mean [{table}]?")


def accumulation(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Return how many micro-batches each rank adds up for one update.

    >>> accumulation(12, 2, 3), accumulation(12, 2, 2)
    (2, 3)

    Raises ConfigError when the ranks' shares would differ.
    """
    micro_batches = global_batch // micro_batch
    if micro_batches % world_size:
        raise ConfigError(
            f"[trainer]: {micro_batches} micro-batches (global_batch {global_batch} / micro_batch "
            f"{micro_batch}) cannot be shared out evenly among {world_size} ranks: make "
            f"global_batch a multiple of {micro_batch * world_size}, or micro_batch smaller"
        )
    return micro_batches // world_size
