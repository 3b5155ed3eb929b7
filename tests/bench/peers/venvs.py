"""Where the peers are installed, which versions, and why one of them is not there.

Standard library only: `install.py` runs without anything else.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Peer:
    """One product in a venv of its own.

    `modules` are imported to see that it works. `foreign_wheel` is a requirement whose only wheel
    claims an interpreter or a libc newer than this machine's: (requirement, python, platform).
    """

    name: str
    modules: tuple[str, ...]
    foreign_wheel: tuple[str, str, str] | None = None

    @property
    def folder(self) -> Path:
        """Its venv."""
        return root() / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """Its pinned requirements."""
        return HERE / f"{self.name}.txt"

    @property
    def mark(self) -> Path:
        """Holds the requirements that were installed whole, once they are."""
        return self.folder / "installed.txt"

    @property
    def failure(self) -> Path:
        """Holds why the last try failed."""
        return root() / f"{self.name}.why"

    def missing(self) -> str:
        """Return why it cannot be used, nothing when it can."""
        if _text(self.mark) == self.requirements.read_text():
            return ""
        if failed := _text(self.failure):
            return f"not installed: {failed}"
        return "not installed: run make bench-peers"


PEERS = {
    peer.name: peer
    for peer in (
        # Built for CPython 3.12 and glibc 2.39 only. All but its CUPTI module is plain Python.
        Peer(
            "nvrx",
            ("nvidia_resiliency_ext.fault_tolerance", "nvidia_resiliency_ext.checkpointing"),
            ("nvidia-resiliency-ext==0.7.0", "3.12", f"manylinux_2_39_{platform.machine()}"),
        ),
        Peer("dlrover", ("dlrover.trainer.torch.main", "dlrover.python.master.main")),
        Peer("torchft", ("torchft",)),
    )
}


def root() -> Path:
    """Return the folder of all venvs: $EVERSTEP_PEERS, else build/peers of this checkout."""
    return Path(os.environ.get("EVERSTEP_PEERS") or ROOT / "build" / "peers")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
