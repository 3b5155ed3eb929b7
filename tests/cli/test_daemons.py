"""How the daemons' verbs refuse to start: one line, the right code, and what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.stage import Stage
from tests.cli.actors import Ended
from tests.cli.scene import Coordinator
from tests.waiting import wait_until

Type = Callable[..., Ended]


@pytest.fixture
def taken() -> Iterator[str]:
    """An address on which somebody listens already."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(*words: object) -> Ended:
    """Run a daemon that will not start, as a process."""
    told = subprocess.run(
        [sys.executable, "-m", "everstep.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Ended(told.returncode, told.stdout, told.stderr)


def written(folder: Path, text: str) -> Path:
    path = folder / "everstep.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("verb", ["agent", "coordinator"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{verb}]\nlistn = 1\n", "[{verb}]: unknown key 'listn' (did you mean 'listen'?)"),
        ("[{verb}]\nlisten = 1\n", "[{verb}]: key 'listen': Expected `str`, got `int`"),
        ("[{verb}]\nlisten = 'x'\n", "[{verb}]: listen: 'x' is not host:port"),
        ("[{verb}\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_keeps_a_daemon_from_starting(
    everstep: Type, tmp_path: Path, verb: str, text: str, says: str
) -> None:
    path = written(tmp_path, text.format(verb=verb))
    told = everstep(verb, "--config", path)
    assert (told.code, told.out) == (64, "")
    assert told.err.startswith(f"everstep: {path}: ")
    assert told.err.count("\n") == 1
    assert says.format(verb=verb) in told.err


@pytest.mark.parametrize(("verb", "table"), [("agent", "collectors"), ("coordinator", "notifiers")])
def test_a_table_of_an_unknown_plugin_keeps_its_daemon_from_starting(
    tmp_path: Path, verb: str, table: str
) -> None:
    path = written(
        tmp_path,
        f'[{table}.nothing]\n[agent]\nsocket = "{tmp_path}/a.sock"\nlisten = "127.0.0.1:0"\n'
        f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n',
    )
    told = refusal(verb, "--config", path)
    assert told.code == 64
    assert f"[{table}.nothing]: unknown {table[:-1]} plugin 'nothing'; known: " in told.err
    assert "Traceback" not in told.err


def test_a_port_in_use_is_told_with_what_to_do(stage: Stage, taken: str) -> None:
    agent = refusal("agent", "--socket", stage.folder / "a.sock", "--listen", taken)
    assert agent.code == 69
    assert "is in use" in agent.err.splitlines()[-1]
    assert "--listen" in agent.err.splitlines()[-1]
    coordinator = refusal("coordinator", "--state-dir", stage.folder, "--listen", taken)
    assert coordinator.code == 69
    assert f"cannot listen on {taken}" in coordinator.err.splitlines()[-1]
    assert "--listen" in coordinator.err.splitlines()[-1]


def test_one_socket_has_one_agent(stage: Stage) -> None:
    first = stage.agent()
    told = refusal("agent", "--socket", first.socket, "--listen", "127.0.0.1:0")
    assert told.code == 69
    assert "another agent is running there" in told.err.splitlines()[-1]
    assert "Traceback" not in told.err


def test_one_journal_has_one_coordinator(stage: Stage) -> None:
    first = Coordinator(stage.folder)
    try:
        told = refusal(
            "coordinator", "--state-dir", stage.folder / "state", "--listen", "127.0.0.1:0"
        )
    finally:
        first.close()
    assert told.code == 69
    assert str(stage.folder / "state") in told.err.splitlines()[-1]
    assert "Traceback" not in told.err


def test_a_coordinator_for_everybody_needs_a_token(everstep: Type, tmp_path: Path) -> None:
    told = everstep("coordinator", "--listen", "0.0.0.0:0", "--state-dir", tmp_path)
    assert told.code == 64
    assert "no token is set" in told.err


def test_a_single_machine_has_both_in_one_process(everstep: Type, stage: Stage) -> None:
    folder = stage.folder / "n1"
    agent = stage.agent(
        config=f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{folder}/state"\n',
        start=False,
    )
    agent.arguments = [*agent.arguments, "--with-coordinator"]
    agent.start()
    wait_until("the agent has its coordinator", lambda: agent.status()["coordinator"]["connected"])
    told = everstep("status", "--coordinator", agent.status()["coordinator"]["url"])
    assert told.code == 0
    assert agent.stop() == 0
