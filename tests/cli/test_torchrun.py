from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agent.stage import Stage
from tests.cli.actors import Ended

from everstep.cli.torchrun import launcher_options

Type = Callable[..., Ended]
Launched = list[str]

JOB = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-id=job"]


@pytest.fixture
def launched(everstep: Type, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> Launched:
    """Return what would have been executed; an agent's socket is there to connect to."""
    del everstep  # first, for it names a socket where nobody is
    found: Launched = []

    def execute(_: str, arguments: list[str], environ: dict[str, str]) -> None:
        found.extend(arguments)
        ours = {name: environ.get(name) for name in ("EVERSTEP_WARM", "EVERSTEP_IN_PLACE")}
        found.extend(f"{name}={value}" for name, value in ours.items() if value == "0")

    path = stage.folder / "agent.sock"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    monkeypatch.setenv("EVERSTEP_SOCKET", str(path))
    monkeypatch.setattr(os, "execve", execute)
    stage._actors.append(listening)
    return found


def test_without_an_agent_it_leaves_with_69_and_the_command_that_starts_one(everstep: Type) -> None:
    told = everstep("torchrun", *JOB, "train.py")
    assert (told.code, told.out) == (69, "")
    assert told.err.count("\n") == 1
    assert "nobody.sock" in told.err
    assert "`everstep agent --with-coordinator`" in told.err


def test_the_plain_command_is_printed_and_executed(everstep: Type, launched: Launched) -> None:
    told = everstep("torchrun", *JOB, "train.py", "--name", "two words", "--help")
    assert told.code == 0
    plain = (
        "torchrun --rdzv-backend=everstep --max-restarts=1000000 --logs-specs=everstep "
        "--nnodes=1 --nproc-per-node=1 --rdzv-id=job train.py --name 'two words' --help"
    )
    assert told.err == f"everstep: {plain}\n"
    assert launched[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert launched[-4:] == ["train.py", "--name", "two words", "--help"]


def test_what_a_person_gave_is_not_filled_in(everstep: Type, launched: Launched) -> None:
    given = ["--max_restarts", "200", "--rdzv-backend", "everstep"]
    told = everstep("torchrun", *JOB, *given, "-m", "my.training", "-m", "x")
    assert told.code == 0
    options = launched[3:]
    assert options == ["--logs-specs=everstep", *JOB, *given, "-m", "my.training", "-m", "x"]


def test_our_own_options_become_variables(everstep: Type, launched: Launched) -> None:
    told = everstep("torchrun", "--no-warm", "--no-in-place", *JOB, "train.py")
    assert told.code == 0
    assert told.err.startswith("everstep: EVERSTEP_WARM=0 EVERSTEP_IN_PLACE=0 torchrun --rdzv")
    assert launched[-3:] == ["train.py", "EVERSTEP_WARM=0", "EVERSTEP_IN_PLACE=0"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to run: everstep torchrun --nnodes=2"),
        (["--standalone", "train.py"], "--standalone replaces the rendezvous"),
        (["--rdzv-backend=c10d", "train.py"], "takes the membership from everstep"),
        (["--rdzv_backend", "c10d", "train.py"], "takes the membership from everstep"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    everstep: Type, launched: Launched, words: list[str], says: str
) -> None:
    told = everstep("torchrun", *words)
    assert told.code == 64
    assert told.err.count("\n") == 1
    assert says in told.err
    assert launched == []


def test_the_scripts_own_arguments_are_its_own(everstep: Type, launched: Launched) -> None:
    told = everstep("torchrun", *JOB, "train.py", "--standalone", "--rdzv-backend=c10d")
    assert told.code == 0
    assert launched[-2:] == ["--standalone", "--rdzv-backend=c10d"]


def test_torchruns_options_end_at_the_script() -> None:
    assert launcher_options(["--nnodes", "2", "a.py", "--tee", "3"]) == {"--nnodes": "2"}
    assert launcher_options(["--no-python", "-r", "3", "a.sh", "--role=x"]) == {
        "--no-python": "",
        "-r": "3",
    }
    assert launcher_options(["--nnodes=1", "--", "--odd.py"]) == {"--nnodes": "1"}
    assert launcher_options(["--rdzv-conf"]) == {"--rdzv-conf": ""}


def test_every_torchrun_option_without_a_value_is_known() -> None:
    from torch.distributed.run import get_args_parser

    from everstep.cli.torchrun import _WITHOUT_VALUE

    of_torch = {
        name
        for action in get_args_parser()._actions
        if action.nargs == 0
        for name in action.option_strings
    }
    assert {name.replace("_", "-") if name[:2] == "--" else name for name in of_torch} == (
        _WITHOUT_VALUE
    )


def test_another_endpoint_is_looked_at_instead(everstep: Type, launched: Launched) -> None:
    told = everstep("torchrun", *JOB, "--rdzv-endpoint=/nowhere/agent.sock", "train.py")
    assert told.code == 69
    assert "no agent on /nowhere/agent.sock" in told.err
    assert launched == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("left_out_or_wrong", "says"),
    [
        (["--nnodes=1"], "pass --rdzv-id=NAME, the same on all nodes of this job"),
        (
            ["--nnodes=1", "--rdzv-id=job", "--max-restarts=3"],
            "--max-restarts is 3: torchrun would give up before everstep decides",
        ),
    ],
)
def test_what_only_the_handler_can_know_ends_with_64_too(
    stage: Stage, left_out_or_wrong: list[str], says: str, tmp_path: Path
) -> None:
    agent = stage.agent()
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never started')\n")
    told = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "torchrun", *left_out_or_wrong, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "EVERSTEP_SOCKET": str(agent.socket)},
    )
    assert told.returncode == 64, told.stderr
    assert says in told.stderr
    assert "Traceback" not in told.stderr
    assert "never started" not in told.stderr
