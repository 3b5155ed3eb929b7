"""Real ranks for tests: forks of one warm interpreter, or stock torchrun."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.ranks import Forge, Started, StartRanks, WriteConfig


@pytest.fixture(scope="session")
def _forge() -> Iterator[Forge]:
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture
def start_ranks(_forge: Forge, tmp_path: Path) -> Iterator[StartRanks]:
    """Start ranks: `start_ranks(3, script)`; what still runs at the end is killed."""
    all_started: list[Started] = []

    def start(world: int, *argv: str | Path, env: Mapping[str, str] | None = None) -> Started:
        started = _forge.start(world, argv, tmp_path / "logs", env or {})
        all_started.append(started)
        return started

    yield start
    for started in all_started:
        started.kill()
        started.wait()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of byte tokens."""
    from everstep.trainer.data import prepare_bytes

    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        text = f"file {number}: " + "to be continued, " * (60 + number)
        (folder / f"{number}.txt").write_text(text)
    prepare_bytes(list(folder.glob("*.txt")), folder / "tokens.bin")
    return folder / "tokens.bin"


@pytest.fixture
def write_config(tmp_path: Path, corpus: Path) -> WriteConfig:
    """Write a run's TOML file: `write_config("run", steps=12, snapshot={"every_steps": 4})`."""

    def write(name: str = "run", *, hooks: Mapping[str, Any] | None = None, **trainer: Any) -> Path:
        table: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "data": str(corpus),
            "steps": 12,
            "seed": 7,
            "seq_len": 16,
            "warmup_steps": 2,
            "process_group_timeout_s": 30.0,
            "save_timeout_s": 30.0,
            "ledger": True,
        } | trainer
        model: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 48}
        model |= table.pop("model", {})
        waiting = {"every_steps": 4, "when_busy": "wait"}
        hooks = {"snapshot": waiting} | dict(hooks or {})
        path = tmp_path / f"{name}.toml"
        tables = [("trainer", table), ("trainer.model", model)]
        tables += [(f"hooks.{hook}", options) for hook, options in hooks.items()]
        path.write_text("\n".join(_table(header, values) for header, values in tables))
        return path

    return write


def _table(header: str, values: Mapping[str, Any]) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML's too.
    return f"[{header}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
