from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.stage import Stage
from tests.cli.actors import Api, Ended, Everstep


@pytest.fixture
def everstep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ended]:
    """Run a verb in this process, on a machine on which nothing of everstep's is set up."""
    return Everstep(monkeypatch, capsys, tmp_path)


@pytest.fixture
def api() -> Iterator[Api]:
    """A server that says what the test wants where the coordinator's API would be."""
    made = Api()
    yield made
    made.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()
