"""Three fixed storms; `make chaos` runs twenty."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.runs import Storm, weather


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_in_a_storm_ends_bit_equal_to_an_undisturbed_one(folder: Path, seed: int) -> None:
    outcome = weather(Storm.of(seed), folder / f"seed{seed}")
    assert outcome.good, outcome
