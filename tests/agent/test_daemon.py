"""The agent as a service: starting, being watched, being looked at, stopping."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.agent.stage import AgentProcess, FakeCoordinator, Stage
from tests.waiting import wait_until

from everstep.wire.messages import Heartbeat, Hello
from everstep.wire.page import PageWriter, Place, StepRecord

pytestmark = pytest.mark.e2e


def samples(agent: AgentProcess) -> dict[str, float]:
    """Return all samples of /metrics as `name{label="value"}`, as Prometheus reads them."""
    status, text = agent.get("/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def refused(stage: Stage, *arguments: str, config: str = "") -> tuple[int, str]:
    """Start an agent that must not come up; return its exit code and what it said."""
    file = stage.folder / "refused.toml"
    file.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "agent", "--config", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


# ------------------------------------------------------------------------------------ stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_within_seconds_and_leaves_nothing_behind(
    stage: Stage, number: signal.Signals
) -> None:
    coordinator = stage.coordinator()
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    stage.client(agent).greet(Hello(role="launcher"))
    began_s = time.monotonic()
    agent.signal(number)
    assert agent.wait() == 0
    assert time.monotonic() - began_s < 5.0
    left = {path.name for path in agent.folder.iterdir()}
    assert left == {"everstep.toml", "log"}
    wait_until("the coordinator sees it hang up", lambda: not coordinator.connected)
    assert "rror" not in agent.log.replace("no errors", "")


def test_it_stops_while_it_looks_for_a_coordinator(stage: Stage) -> None:
    agent = stage.agent(config='[agent]\ncoordinators = ["10.255.255.1:9", "nowhere.invalid:9"]\n')
    began_s = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - began_s < 5.0


# ------------------------------------------------------------------------------------ starting


def test_a_socket_left_behind_by_a_killed_agent_is_replaced(stage: Stage) -> None:
    agent = stage.agent()
    agent.kill()
    assert agent.socket.is_socket()
    agent.start()
    stage.client(agent).greet(Hello(role="launcher"))


def test_a_second_agent_on_the_same_socket_is_refused_and_the_first_goes_on(stage: Stage) -> None:
    agent = stage.agent()
    code, said = refused(stage, "--socket", str(agent.socket), "--listen", "127.0.0.1:0")
    assert code == 69
    assert "another agent is running there" in said
    assert "--socket" in said
    stage.client(agent).greet(Hello(role="launcher"))


def test_a_file_that_is_no_socket_is_not_removed(stage: Stage) -> None:
    path = stage.folder / "precious"
    path.write_text("data")
    code, said = refused(stage, "--socket", str(path), "--listen", "127.0.0.1:0")
    assert code == 69
    assert "is no socket" in said
    assert path.read_text() == "data"


def test_a_port_in_use_is_named_with_what_to_do(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = stage.folder / "s"
        code, said = refused(stage, "--socket", str(path), "--listen", f"127.0.0.1:{port}")
    assert code == 69
    assert f"port {port}" in said
    assert "--listen" in said
    assert not path.exists()


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ("[agent]\nlisten_on = 1\n", "did you mean 'listen'"),
        ("[agent]\nheartbeat_s = 0\n", "heartbeat_s"),
        ('[agent]\ncoordinators = ["http://x"]\n', "neither host:port nor ws://"),
        ('[agent]\nlisten = "9464"\n', "is not host:port"),
        ('[agent]\nnode = "a b"\n', "is no node name"),
        ('[agent]\ntoken_file = "/nonexistent"\n', "/nonexistent"),
        ("[collectors.hots]\n", "did you mean 'host'"),
        ("[agent\n", "not valid TOML"),
    ],
)
def test_a_wrong_configuration_is_refused_with_file_table_and_key(
    stage: Stage, config: str, hint: str
) -> None:
    code, said = refused(stage, "--socket", str(stage.folder / "s"), config=config)
    assert code == 64
    assert "refused.toml" in said
    assert hint in said


def test_a_path_too_long_for_a_socket_is_refused_before_the_kernel_does(stage: Stage) -> None:
    code, said = refused(stage, "--socket", "/tmp/" + "x" * 120, "--listen", "127.0.0.1:0")
    assert code == 64
    assert "107 bytes" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent serves other users")
def test_roots_agent_lets_every_user_in_and_makes_its_folder(stage: Stage) -> None:
    agent = stage.agent(start=False)
    deep = agent.folder / "run" / "everstep"
    agent.arguments = [*agent.arguments, "--socket", str(deep / "agent.sock")]
    agent.start(wait=False)
    path = deep / "agent.sock"
    wait_until("it is ready", (deep / "agent.json").exists)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(deep.stat().st_mode) == 0o755


def test_the_mode_of_the_socket_can_be_chosen(stage: Stage) -> None:
    agent = stage.agent(config="[agent]\nsocket_mode = 0o600\n")
    assert stat.S_IMODE(agent.socket.stat().st_mode) == 0o600


# ---------------------------------------------------------------------------- being looked at


def test_metrics_are_what_prometheus_reads_and_hold_agent_host_and_ranks(stage: Stage) -> None:
    coordinator = stage.coordinator()
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    writer = PageWriter(Place("j", 1, 0, 1, 0, os.getpid()))
    client = stage.client(agent)
    client.greet(
        Hello(role="rank", job="j", generation=1, rank=0, local_rank=0, page=True), writer.fd
    )
    writer.enter("step", step=1)
    record = StepRecord(
        41, time.time(), time.monotonic_ns(), 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, 0.5, 100, 0.1
    )
    writer.finished(record)

    def has_rank() -> bool:
        return any(
            k.startswith("everstep_rank_step{") and v == 41 for k, v in samples(agent).items()
        )

    wait_until("the rank's step in /metrics", has_rank)
    found = samples(agent)
    writer.close()
    assert found["everstep_coordinator_connected{}"] == 1.0
    assert found['everstep_clients{role="rank"}'] == 1.0
    assert found['everstep_plugin_up{kind="collectors",plugin="host"}'] == 1.0
    assert 0 < found["process_memory_usage_bytes{}"] < 2**31
    assert any(name.startswith("system_cpu") for name in found)
    assert any(name.startswith("target_info{") and 'host_name="n1"' in name for name in found)


def test_health_turns_bad_with_a_reason_when_no_coordinator_is_reached(stage: Stage) -> None:
    coordinator = stage.coordinator()
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    wait_until("it is healthy", lambda: agent.get("/healthz")[0] == 200)
    coordinator.stop()
    wait_until("it is not", lambda: agent.get("/healthz")[0] == 503)
    facts = agent.health()
    assert facts["status"] == "unhealthy"
    assert any("no coordinator for" in reason for reason in facts["reasons"])
    coordinator.forget()
    coordinator.start()
    beat = coordinator.expect(Heartbeat)
    assert beat.health == "healthy"
    assert agent.get("/healthz")[0] == 200


def test_an_agent_that_has_no_coordinator_configured_is_healthy(stage: Stage) -> None:
    assert stage.agent().get("/healthz")[0] == 200


def test_agent_json_says_where_everything_is(stage: Stage) -> None:
    agent = stage.agent()
    facts = json.loads((agent.folder / "agent.json").read_text())
    assert facts["pid"] == agent.pid
    assert facts["node"] == "n1"
    assert facts["socket"] == str(agent.socket)
    assert f"listen={facts['listen']}" in agent.log
    assert not facts["listen"].endswith(":0")


# ------------------------------------------------------------------------------- being watched


class ServiceManager:
    """What systemd is to a service: a datagram socket that hears how it is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[str] = []
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.settimeout(0)
        self.sock.bind("\0" + address[1:] if address[0] == "@" else address)

    def listen(self) -> list[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard += self.sock.recv(4096).decode().split("\n")
        return self.heard

    def expect(self, word: str, times: int = 1) -> None:
        wait_until(
            f"{word} at the service manager, heard {self.heard}",
            lambda: sum(word in said for said in self.listen()) >= times,
        )

    def silent_for(self, seconds: float) -> bool:
        self.listen()
        self.sock.settimeout(seconds)
        try:
            self.heard += self.sock.recv(4096).decode().split("\n")
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(0)
        return False


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, stage: Stage) -> Iterator[ServiceManager]:
    path = str(stage.folder / "notify")
    manager = ServiceManager(path if request.param == "path" else "@" + path)
    yield manager
    manager.sock.close()


def test_the_service_manager_hears_of_readiness_of_life_and_of_the_end(
    stage: Stage, manager: ServiceManager
) -> None:
    coordinator = stage.coordinator()
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "800000"}
    agent = stage.agent(coordinator, environ=environ)
    manager.expect("READY=1")
    manager.expect("WATCHDOG=1", times=3)
    manager.expect(f"STATUS=n1: coordinator ws://{coordinator.address}")

    agent.signal(signal.SIGSTOP)
    wait_until("a stopped agent gives no sign of life", lambda: manager.silent_for(2.0))
    manager.heard.clear()
    agent.signal(signal.SIGCONT)
    manager.expect("WATCHDOG=1")

    assert agent.stop() == 0
    manager.expect("STOPPING=1")


def test_a_watchdog_meant_for_another_process_is_left_alone(
    stage: Stage, manager: ServiceManager
) -> None:
    environ = {"WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"}
    agent = stage.agent(environ=environ | {"NOTIFY_SOCKET": manager.address})
    manager.expect("READY=1")
    assert agent.stop() == 0
    manager.expect("STOPPING=1")
    assert not any("WATCHDOG" in said for said in manager.heard)


def test_a_coordinator_can_run_in_the_same_process(stage: Stage) -> None:
    pytest.importorskip("everstep.coordinator.daemon")
    state = stage.folder / "state"
    config = f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{state}"\n'
    agent = stage.agent(start=False, config=config)
    agent.arguments = [*agent.arguments, "--with-coordinator"]
    agent.start()
    wait_until("the two find each other", lambda: agent.status()["coordinator"]["connected"])
    assert agent.stop() == 0


def test_with_a_coordinator_beside_a_refusal_is_still_one_line(stage: Stage) -> None:
    agent = stage.agent()
    state = stage.folder / "state"
    config = f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{state}"\n'
    words = ("--with-coordinator", "--socket", str(agent.socket), "--listen", "127.0.0.1:0")
    code, said = refused(stage, *words, config=config)
    assert code == 69
    assert said.splitlines()[-1].startswith(f"everstep: {agent.socket}: another agent is running")


def test_two_agents_on_one_machine_keep_apart(stage: Stage) -> None:
    coordinator: FakeCoordinator = stage.coordinator()
    stage.agent(coordinator, name="a")
    stage.agent(coordinator, name="b")
    wait_until("both are there", lambda: {h.node for h in coordinator.hellos} == {"a", "b"})
