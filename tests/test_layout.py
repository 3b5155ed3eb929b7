"""The rooms: one namespace of several source roots, and nothing imported under a wrong name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ["sdk", "agent", "coordinator", "trainer", "plugins"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("root", ROOTS)
def test_everstep_stays_a_namespace(root: str) -> None:
    assert not (ROOT / root / "everstep" / "__init__.py").exists()


def test_every_list_of_source_roots_is_the_same() -> None:
    tool = PYPROJECT["tool"]
    wheel = tool["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == ROOTS
    assert wheel["dev-mode-dirs"] == ROOTS
    assert wheel["only-include"] == [f"{root}/everstep" for root in ROOTS]
    assert tool["ruff"]["src"] == ROOTS
    assert tool["mypy"]["mypy_path"].split(":") == ROOTS
    assert tool["coverage"]["run"]["source"] == ROOTS


def test_no_module_is_loaded_a_second_time_under_its_folders_name() -> None:
    # pytest itself makes an empty module of each folder's name; code in one would be the fault.
    twice = [m for m in sys.modules if m.split(".")[0] in ROOTS and "." in m]
    assert twice == []


def test_the_entry_point_that_torch_imports_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import everstep.launch.entry; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['everstep']"


def test_the_daemons_and_the_command_line_never_load_torch() -> None:
    code = (
        "import sys, everstep.agent.daemon, everstep.coordinator.daemon, everstep.cli.main; "
        "print('torch' in sys.modules, 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]
