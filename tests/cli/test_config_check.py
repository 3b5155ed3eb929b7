from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.actors import Ended

from everstep.cli.tables import check
from everstep.sdk.config import ConfigFile

Everstep = Callable[..., Ended]

RIGHT = """
[agent]
coordinators = ["head:7070"]
[coordinator]
mode = "observe"
[coordinator.silence]
silent_s = 3.0
[trainer]
run_dir = "runs/a"
data = "bytes.bin"
steps = 100
[collectors.host]
enabled = false
[actions.log]
level = "info"
[notifiers.journal]
[hooks.snapshot]
every_steps = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_a_right_file_is_ok(everstep: Everstep, file: Callable[[str], Path]) -> None:
    path = file(RIGHT)
    assert everstep("config", "check", path) == Ended(0, f"{path}: ok\n", "")
    told = everstep("config", "check", path, "--json")
    assert told.json == {"file": str(path), "ok": True, "errors": [], "notes": []}


def test_without_a_file_the_defaults_are_ok(everstep: Everstep) -> None:
    told = everstep("config", "check")
    assert (told.code, told.out) == (
        0,
        "no configuration file: the built-in defaults are ok\n",
    )


def test_all_mistakes_are_told_not_only_the_first(
    everstep: Everstep, file: Callable[[str], Path]
) -> None:
    path = file("""
        [agent]
        nod = "x"
        heartbeat_s = "fast"
        coordinators = ["head:70", 5]
        [coordinator]
        mode = "acct"
        [coordinator.silence]
        silent_s = 0
        [colectors.host]
        [collectors.hots]
        [collectors.host]
        interval_s = -1
        enabled = "no"
        [hooks.snapshot]
        when_busy = "panic"
        [detectors]
        clock = 5
    """)
    told = everstep("config", "check", path)
    assert told.code == 64
    assert told.err == ""
    lines = [line.removeprefix(f"{path}: ") for line in told.out.splitlines()]
    begins = [
        "[agent]: unknown key 'nod' (did you mean 'node'?); known keys: node, ",
        "[agent]: key 'heartbeat_s': Expected `float`, got `str`",
        "[agent]: key 'coordinators[1]': Expected `str`, got `int`",
        "[coordinator]: key 'mode': Invalid enum value 'acct'; allowed: 'observe', 'approve'",
        "[coordinator]: key 'silence.silent_s': Expected `float` > 0.0",
        "[colectors]: unknown table 'colectors' (did you mean 'collectors'?); known: actions, ",
        "[collectors.hots]: unknown collector plugin 'hots' (did you mean 'host'?); known: host, ",
        "[collectors.host]: key 'enabled': Expected `bool`, got 'no'",
        "[collectors.host]: key 'interval_s': Expected `float` > 0.0",
        "[hooks.snapshot]: key 'when_busy': Invalid enum value 'panic'; allowed: 'skip', 'wait'",
        "[detectors.clock] must be a table, not 5",
    ]
    assert sorted(lines) == [
        line for begin in sorted(begins) for line in sorted(lines) if line.startswith(begin)
    ]
    assert len(lines) == len(begins)


def test_json_names_table_and_key(everstep: Everstep, file: Callable[[str], Path]) -> None:
    path = file("[coordinator.budget]\nmixed = 0\n")
    told = everstep("config", "check", path, "--json")
    assert told.code == 64
    (error,) = told.json["errors"]
    assert (error["table"], error["key"]) == ("coordinator", "budget.mixed")
    assert "budget.mixed" in error["message"]
    assert told.json["ok"] is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[agent]\nlisten = 'here'\n", "'here' is not host:port"),
        ("[agent]\ncoordinators = ['head']\n", "'head' is neither host:port nor ws://"),
        ("[agent]\ntoken = 'a'\ntoken_file = 'b'\n", "exclude each other"),
        ("[coordinator]\nlisten = '0.0.0.0:7070'\n", "no token is set"),
        ("[coordinator]\ntoken_file = '/nowhere/token'\n", "/nowhere/token"),
        ("[trainer]\nrun_dir = 'a'\ndata = 'b'\n", "missing required field `steps`"),
        ("[hooks.grad_clip]\nmax_norm = 0\n", "max_norm must be above 0"),
        ("agent = 5\n", "[agent] must be a table, not 5"),
        ("hooks = 5\n", "[hooks] must be a table, not 5"),
        ("answer = 42\n", "unknown table 'answer'"),
        ("[agent\n", "not valid TOML"),
    ],
)
def test_what_only_the_start_would_find_is_found(
    everstep: Everstep, file: Callable[[str], Path], text: str, says: str
) -> None:
    path = file(text)
    told = everstep("config", "check", path)
    assert told.code == 64
    assert told.out.startswith(f"{path}: ")
    assert says in told.out
    assert told.out.count("\n") == 1


def test_a_file_that_is_not_there_is_an_error(everstep: Everstep, tmp_path: Path) -> None:
    told = everstep("config", "check", tmp_path / "none.toml")
    assert (told.code, told.out) == (64, f"{tmp_path / 'none.toml'}: there is no such file\n")


def test_hooks_whose_torch_is_missing_are_named_and_not_checked(
    everstep: Everstep, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> type:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("everstep.cli.tables.door.load", load)
    path = file("[hooks.grad_clip]\nmax_nrm = 1\n[hooks.nothing]\n")
    told = everstep("config", "check", path)
    assert told.code == 64, "the name of a hook can be checked all the same"
    assert f"{path}: [hooks.nothing]: unknown hook plugin" in told.out
    assert f"{path}: [hooks.grad_clip] was not checked: torch is not installed here\n" in told.out


def test_a_token_that_this_user_may_not_read_is_no_mistake_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(self: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    file = ConfigFile(Path("x.toml"), {"coordinator": {"token_file": "/secret"}})
    monkeypatch.setattr(Path, "read_text", forbidden)
    checked = check(file, {})
    assert checked.errors == []
    assert "was not checked" in checked.notes[0]
    assert "as the user who runs it" in checked.notes[0]


def test_a_hook_that_needs_no_torch_is_checked_without_it(
    file: Callable[[str], Path],
) -> None:
    import subprocess
    import sys

    path = file("[hooks.snapshot]\nkeep = 1\n[hooks.progress]\n[hooks.loss_spike]\n")
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom everstep.cli.main import main\n"
        f"main(['config', 'check', {str(path)!r}])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert told.returncode == 64, told.stderr
    assert told.stdout.startswith(f"{path}: [hooks.snapshot]: keep must be 2 or more")
    assert told.stdout.count("\n") == 1
