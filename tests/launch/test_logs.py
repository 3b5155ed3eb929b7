"""What a rank leaves behind is the script's own affair: whatever it is, it becomes evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.launch import logs


def left_behind(folder: Path, content: str) -> str | None:
    specs = logs.EverstepLogs(log_dir=str(folder))
    destination = specs.reify({0: {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "0"}})
    Path(destination.error_files[0]).write_text(content)
    return logs.evidence(0, 0).error


def message(told: Any) -> str:
    return json.dumps({"message": told})


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "[" * 100_000, message({"extraInfo": None}), message({"extraInfo": [1]})],
)
def test_an_error_file_of_any_content_is_passed_over(tmp_path: Path, content: str) -> None:
    assert left_behind(tmp_path, content) is None


def test_the_traceback_is_taken_whole(tmp_path: Path) -> None:
    told = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback\nValueError: x"}}
    assert left_behind(tmp_path, message(told)) == "Traceback\nValueError: x"


def test_of_a_long_one_its_beginning_and_its_end(tmp_path: Path) -> None:
    error = left_behind(tmp_path, message("Traceback " + "x" * 5_000_000 + " ValueError"))
    assert error is not None
    assert len(error) < 20_000
    assert error.startswith("Traceback x")
    assert error.endswith("x ValueError")
