"""The benchmarks' one form, and that their parts do what their examples say."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.bench import form, run_all, swarm

BENCH = Path(__file__).parent / "bench"
KEYS = {"bench", "figures", "peers", "targets", "runs", "machine", "why"}


def test_a_benchmark_prints_progress_on_stderr_and_one_json_line_last_on_stdout() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "hooks.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == KEYS
    assert found["bench"] == "hooks"
    assert found["targets"] == {"hooks_us_per_step": 20.0, "default_hooks_us_per_step": 60.0}
    assert found["figures"].keys() == found["targets"].keys()
    assert all(value > 0 for value in found["figures"].values())
    assert done.stderr


def test_a_figure_that_is_missing_needs_its_reason() -> None:
    found = form.Form("x", targets={}, runs=1, machine="here")
    with pytest.raises(ValueError, match="reason"):
        found.put("speed_s", None)
    found.put("speed_s", None, "nobody ran")
    assert json.loads(found.line())["figures"] == {"speed_s": None}
    assert json.loads(found.line())["why"] == {"speed_s": "nobody ran"}


def test_a_figure_that_is_no_number_is_refused() -> None:
    found = form.Form("x", targets={}, runs=1, machine="here")
    with pytest.raises(ValueError, match="nan"):
        found.put("speed_s", float("nan"))


def test_the_table_shows_value_target_peer_and_what_failed() -> None:
    found = form.Form("mttr", targets={"rank_kill_s": 1.0}, runs=5, machine="2 cores")
    found.put("rank_kill_s", 0.93)
    found.put_peer("torchrun", "rank_kill_s", 4.9)
    whole: dict[str, Any] = {
        "at": "today",
        "quick": False,
        "benches": [json.loads(found.line())],
        "failed": {"agent": "it ended with 1"},
    }
    lines = run_all.table(whole).splitlines()
    assert "| rank_kill_s | 0.93 | 1.0 | torchrun 4.9 |" in lines
    assert "**agent failed**: it ended with 1" in lines


@pytest.mark.parametrize("module", [form, swarm], ids=lambda m: m.__name__)
def test_the_examples_hold(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


def test_every_benchmark_is_run_with_the_others() -> None:
    runnable = {p.stem for p in BENCH.glob("*.py") if "form.options(" in p.read_text()}
    assert runnable == set(run_all.BENCHES)
