from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.stage import Stage
from tests.cli.actors import Api as Server
from tests.cli.actors import Ended

from everstep.cli.api import Api
from everstep.cli.demo.ports import free_port
from everstep.cli.doctor import kernel, machine, reach
from everstep.cli.doctor.checks import Check, Found, Patient, diagnose
from everstep.cli.doctor.examination import CHECKS
from everstep.sdk.config import ConfigError, ConfigFile

Type = Callable[..., Ended]


def patient(**changes: Any) -> Patient:
    usual: dict[str, Any] = {
        "environ": {},
        "file": ConfigFile(),
        "api": Api(f"http://127.0.0.1:{free_port()}"),
        "socket": None,
        "root": False,
        "coordinator_named": False,
    }
    return Patient(**(usual | changes))


def raising(number: int) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


# ------------------------------------------------------------------------------------ the verb


def test_it_says_of_each_thing_what_it_found_and_what_that_is_for(everstep: Type) -> None:
    told = everstep("doctor", "--json")
    assert told.code in (0, 69)
    assert [one["name"] for one in told.json] == [check.name for check in CHECKS]
    for one in told.json:
        assert one["state"] in ("ok", "warn", "missing")
        assert one["found"]
        assert one["purpose"]
        assert one["state"] == "ok" or one["advice"], one
    text = everstep("doctor").out.splitlines()
    assert text[0].split() == ["STATE", "WHAT", "FOUND", "FOR", "TO", "DO"]
    assert len(text) == 1 + len(CHECKS)


def test_a_machine_without_daemons_is_not_broken(everstep: Type) -> None:
    told = everstep("doctor", "--json")
    found = {one["name"]: one for one in told.json}
    for name in ("agent", "coordinator"):
        assert (found[name]["state"], found[name]["broken"]) == ("warn", False)


def test_a_coordinator_that_was_named_and_does_not_answer_is_broken(everstep: Type) -> None:
    told = everstep("doctor", "--coordinator", f"127.0.0.1:{free_port()}", "--json")
    assert told.code == 69
    (found,) = [one for one in told.json if one["name"] == "coordinator"]
    assert (found["state"], found["broken"]) == ("missing", True)


@pytest.mark.parametrize("text", ["[agent]\nnod = 1\n", "[agent]\ncoordinators = 5\n", "[agent\n"])
def test_a_wrong_file_is_a_finding_and_the_rest_is_looked_at(
    everstep: Type, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    told = everstep("doctor", "--config", path, "--json")
    assert told.code == 69
    assert told.json[0]["broken"]
    assert str(path) in told.json[0]["found"]
    assert len(told.json) == len(CHECKS)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom everstep.cli.main import main\n"
        "main(['doctor', '--json'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f'"found": "{version("torch")}"' in told.stdout


# ---------------------------------------------------------------------------------- the frame


def test_a_check_that_raises_or_hangs_costs_the_others_nothing() -> None:
    over = threading.Event()

    def hang(_: Patient) -> Found:
        over.wait(30)
        return Found("ok", "")

    def broken(_: Patient) -> Found:
        raise ZeroDivisionError("by nothing")

    checks = [
        Check("a", "x", broken),
        Check("b", "x", hang),
        Check("c", "x", lambda _: Found("ok", "fine")),
    ]
    a, b, c = diagnose(checks, patient(), deadline_s=0.2)
    over.set()
    assert a.found == "cannot be looked at: ZeroDivisionError: by nothing"
    assert (b.state, b.found, b.broken) == ("missing", "no answer within 0.2 s", True)
    assert (c.state, c.found) == ("ok", "fine")


# ------------------------------------------------------------------------------- what it sees


def test_the_kernel_of_this_machine_has_what_is_needed() -> None:
    assert kernel.memfd_sealing(patient()).state == "ok"
    assert kernel.pidfd(patient()).state == "ok"


@pytest.mark.parametrize(
    ("name", "look"), [("memfd_create", kernel.memfd_sealing), ("pidfd_open", kernel.pidfd)]
)
def test_a_sandbox_that_forbids_what_is_needed_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, look: Callable[[Patient], Found]
) -> None:
    monkeypatch.setattr(os, name, raising(errno.EPERM))
    found = look(patient())
    assert (found.state, found.broken) == ("missing", True)
    assert "seccomp" in found.advice


def test_an_older_kernel_goes_without_the_peers_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "getsockopt", raising(errno.ENOPROTOOPT))
    found = kernel.peer_pidfd(patient())
    assert (found.state, found.broken) == ("warn", False)


@pytest.mark.parametrize(
    ("number", "says"), [(errno.EACCES, "CAP_SYSLOG"), (errno.ENOENT, "into the container")]
)
def test_a_kernel_log_that_cannot_be_read_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    monkeypatch.setattr(os, "open", raising(number))
    found = kernel.kernel_log(patient())
    assert found.state == "warn"
    assert says in found.advice


@pytest.mark.parametrize(
    ("scope", "root", "state"),
    [
        ("0", False, "ok"),
        ("1", False, "ok"),
        ("2", False, "warn"),
        ("2", True, "ok"),
        ("3", True, "warn"),
    ],
)
def test_who_may_look_into_a_rank_is_read_from_yama(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, root: bool, state: str
) -> None:
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(kernel, "PTRACE_SCOPE", tmp_path / "scope")
    assert kernel.ptrace_scope(patient(root=root)).state == state


def test_without_yama_nothing_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "PTRACE_SCOPE", tmp_path / "none")
    assert kernel.ptrace_scope(patient()).state == "ok"


@pytest.mark.parametrize(
    ("here", "state", "broken"),
    [
        ("2.13.0+cpu", "ok", False),
        ("2.14.0a0", "ok", False),
        ("3.0", "ok", False),
        ("2.9.1", "missing", True),
        (None, "warn", False),
    ],
)
def test_torchs_version_is_compared_with_the_oldest_that_works(
    monkeypatch: pytest.MonkeyPatch, here: str | None, state: str, broken: bool
) -> None:
    def found(_: str) -> str:
        if here is None:
            raise PackageNotFoundError
        return here

    monkeypatch.setattr(machine, "version", found)
    answer = machine.torch(patient())
    assert (answer.state, answer.broken) == (state, broken)


def test_the_oldest_torch_is_the_one_that_the_launcher_asks_for() -> None:
    from everstep.launch.terms import OLDEST_TORCH

    assert machine.oldest_torch() == OLDEST_TORCH


@pytest.mark.parametrize(
    ("free", "state", "broken"),
    [(1 << 40, "ok", False), (1 << 29, "warn", False), (1 << 20, "missing", True)],
)
def test_the_journals_room_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str, broken: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    file = ConfigFile(Path("x"), {"coordinator": {"state_dir": str(tmp_path / "a" / "b")}})
    found = machine.state_folder(patient(file=file))
    assert (found.state, found.broken) == (state, broken)
    assert str(tmp_path / "a" / "b") in found.text


@pytest.mark.parametrize(("hard", "state"), [(1024, "warn"), (524288, "ok"), (-1, "ok")])
def test_a_small_limit_of_open_files_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, hard: int, state: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    assert machine.open_files(patient()).state == state


def test_where_the_socket_would_be_depends_on_who_asks(tmp_path: Path) -> None:
    nowhere = machine.runtime_folder(patient())
    there = Path("/run/everstep/agent.sock").exists()
    assert nowhere.state == ("ok" if there else "warn")
    assert machine.runtime_folder(patient(root=True)).state == "ok"
    assert machine.runtime_folder(patient(environ={"XDG_RUNTIME_DIR": "/x"})).state == "ok"
    assert machine.runtime_folder(patient(socket=tmp_path / "a.sock")).text.endswith("a.sock")


def test_a_file_kept_from_this_user_is_a_warning_and_a_broken_one_is_broken() -> None:
    kept = ConfigError("/etc/everstep/everstep.toml: cannot be read: Permission denied")
    kept.__cause__ = PermissionError(13, "Permission denied")
    assert machine.configuration(patient(file=kept)).state == "warn"
    assert machine.configuration(patient(file=ConfigError("not valid TOML"))).broken


def test_a_running_agent_says_how_it_is(stage: Stage) -> None:
    agent = stage.agent(name="n3")
    found = reach.agent(patient(socket=agent.socket))
    assert (found.state, found.text) == ("ok", f"n3 on {agent.socket}")


def test_something_else_on_the_agents_socket_is_broken(stage: Stage) -> None:
    path = stage.folder / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()

        def hang_up() -> None:
            client, _ = server.accept()
            client.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        found = reach.agent(patient(socket=path))
        thread.join(10)
    assert (found.state, found.broken) == ("missing", True)


def test_a_socket_that_was_left_behind_is_as_good_as_none(stage: Stage) -> None:
    path = stage.folder / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
    found = reach.agent(patient(socket=path))
    assert (found.state, found.broken) == ("warn", False)


def test_the_coordinators_token_is_tried(api: Server) -> None:
    api.token = "secret"
    api.says["GET /v1/nodes"] = 200, {"nodes": [{}, {}]}
    found = reach.coordinator(patient(api=Api(api.url, "guess")))
    assert (found.state, found.broken) == ("missing", True)
    found = reach.coordinator(patient(api=Api(api.url, "secret")))
    assert (found.state, found.text) == ("ok", f"{api.url} knows 2 nodes")


def test_no_nvidia_driver_is_a_normal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def absent(_: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", absent)
    assert machine.nvml(patient()).state == "ok"


def test_a_driver_that_does_not_start_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def broken(_: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", broken)
    found = machine.nvml(patient())
    assert (found.state, found.broken) == ("missing", True)
