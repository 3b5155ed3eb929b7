"""What the demo trains: a tiny decoder on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

NPROC = 1
GLOBAL_BATCH = 12


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run: where it keeps its things and how long it goes on."""

    folder: Path
    data: Path
    steps: int
    seed: int
    snapshot_every: int = 10
    micro_batch: int = 2
    min_step_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        """Snapshots and ledger."""
        return self.folder

    def write(self) -> Path:
        """Write the configuration file and return its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.toml"
        path.write_text(
            "[trainer]\n"
            f'run_dir = "{self.folder}"\ndata = "{self.data}"\n'
            f"steps = {self.steps}\nseed = {self.seed}\nledger = true\n"
            f"global_batch = {GLOBAL_BATCH}\nmicro_batch = {self.micro_batch}\n"
            f"min_step_s = {self.min_step_s}\nseq_len = 128\nthreads = 1\n"
            'device = "cpu"\n\n'
            "[trainer.model]\ndim = 96\nlayers = 3\nheads = 4\nkv_heads = 4\nffn_dim = 256\n\n"
            f"[hooks.snapshot]\nevery_steps = {self.snapshot_every}\n"
        )
        return path


def library_bytes(out: Path) -> Path:
    """Pack the standard library's sources into a token file; text that every machine has."""
    from everstep.trainer import prepare_bytes

    prepare_bytes(Path(sysconfig.get_path("stdlib")).glob("*.py"), out)
    return out


def arguments(config: Path, nodes: str) -> list[str]:
    """Return what follows `everstep torchrun --rdzv-id=...` for our own trainer."""
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={NPROC}",
        "-m",
        "everstep.trainer",
        "--config",
        str(config),
    ]
