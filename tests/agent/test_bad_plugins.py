"""Plugins of strangers, installed as strangers' plugins are, that do everything they must not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, Stage
from tests.waiting import wait_until

from everstep.wire.messages import Finding, NodeFinding

pytestmark = pytest.mark.e2e

COMMON = """
import msgspec, os, sys, time
from everstep.sdk import Finding, Reading

class Config(msgspec.Struct, frozen=True, kw_only=True):
    interval_s: float = 0.1
    timeout_s: float = 0.5

class Base:
    Config = Config
    def __init__(self, config): self.calls = 0
"""

GOOD = (
    COMMON
    + """
class Plugin(Base):
    def collect(self):
        self.calls += 1
        return [Reading(name="good.calls", value=self.calls, unit="{call}", counter=True)]
"""
)


def install(folder: Path, **plugins: str) -> dict[str, str]:
    """Lay out a distribution with one module for each plugin; return the environment to find it."""
    info = folder / "strangers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    groups: dict[str, list[str]] = {}
    for name, code in plugins.items():
        (folder / f"stranger_{name}.py").write_text(code)
        kind = "detectors" if "def detect" in code else "collectors"
        groups.setdefault(kind, []).append(f"{name} = stranger_{name}:Plugin")
    (info / "entry_points.txt").write_text(
        "\n".join(f"[everstep.{kind}]\n" + "\n".join(lines) for kind, lines in groups.items())
    )
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


def start(
    stage: Stage, coordinator: FakeCoordinator, config: str = "", **plugins: str
) -> AgentProcess:
    environ = install(stage.folder / "site", good=GOOD, **plugins)
    agent = stage.agent(coordinator, environ=environ, config=config)
    coordinator.expect_connected()
    return agent


def facts(agent: AgentProcess, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [p for p in agent.health()["plugins"] if p["name"] == name]
    return found[0]


def works(agent: AgentProcess) -> None:
    """Another plugin and the agent itself go on as if nothing had happened."""
    calls = facts(agent, "good")["calls"]
    wait_until("the good plugin is called", lambda: facts(agent, "good")["calls"] > calls + 3)
    assert facts(agent, "good")["state"] == "on"
    assert "good_calls_total" in agent.get("/metrics")[1]


def trouble(coordinator: FakeCoordinator, source: str) -> list[Finding]:
    found = [m for m in coordinator.of(NodeFinding) if m.plugin == source]
    return [m.finding for m in sorted(found, key=lambda m: m.seq)]


BROKEN = {
    "raises": (
        "def collect(self): return [1 / 0]",
        "raised",
        "ZeroDivisionError: division by zero (stranger_raises.py:13)",
    ),
    "raises late": (
        "def collect(self):\n  yield from ()\n  raise KeyError('x')",
        "raised",
        "KeyError",
    ),
    "exits": ("def collect(self): sys.exit(3)", "raised", "SystemExit: 3"),
    "cannot be shown": (
        "def collect(self):\n  class E(Exception):\n    def __str__(self): raise E()\n  raise E()",
        "raised",
        "cannot be shown",
    ),
    "half a letter": ("def collect(self): raise OSError('\\udcff')", "raised", "OSError: ?"),
    "hangs": ("def collect(self): time.sleep(600)", "hung", "did not come back within 0.5 s"),
    "returns None": ("def collect(self): pass", "nonsense", "returned None"),
    "returns text": ("def collect(self): return 'abc'", "nonsense", "returned 'abc'"),
    "returns strangers": ("def collect(self): return [object()]", "nonsense", "neither Reading"),
    "never ends": (
        "def collect(self):\n  while True: yield Reading(name='a', value=1.0)",
        "nonsense",
        "more than 10000",
    ),
    "text for a value": (
        "def collect(self): return [Reading(name='a.b', value='hot')]",
        "nonsense",
        "value is 'hot'",
    ),
    "a name that is none": (
        "def collect(self): return [Reading(name='A b', value=1.0)]",
        "nonsense",
        "'A b'",
    ),
    "a severity that is none": (
        "def collect(self): return [Finding(name='x', component='host', severity='bad',"
        " summary='s', at_s=1.0)]",
        "nonsense",
        "'bad'",
    ),
    "a counter below zero": (
        "def collect(self): return [Reading(name='a', value=-1.0, counter=True)]",
        "nonsense",
        "a counter cannot be -1.0",
    ),
}  # fmt: skip


STARTS_BADLY = {
    "import": "import nothing_of_that_name\n",
    "syntax": "class Plugin(:\n",
    "exit": "import sys; sys.exit(1)\n",
    "constructor": COMMON + "class Plugin(Base):\n"
    "    def __init__(self, config): 1 / 0\n    def collect(self): return []",
    "asks too much": COMMON + "class Plugin(Base):\n"
    "    def __init__(self, config, moon): pass\n    def collect(self): return []",
    "no verb": COMMON + "class Plugin(Base): pass\n",
}


@dataclass(frozen=True)
class Hospital:
    """One agent with every bad plugin at once, and one good plugin among them."""

    agent: AgentProcess
    coordinator: FakeCoordinator


@pytest.fixture(scope="module")
def hospital() -> Iterator[Hospital]:
    stage = Stage()
    broken = {
        named(kind): COMMON + "class Plugin(Base):\n    " + verb.replace("\n", "\n    ")
        for kind, (verb, _, _) in BROKEN.items()
    }
    badly = {named(kind): code for kind, code in STARTS_BADLY.items()}
    coordinator = stage.coordinator()
    yield Hospital(start(stage, coordinator, **broken, **badly), coordinator)
    stage.close()


def named(kind: str) -> str:
    return kind.replace(" ", "_")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_plugin_that_misbehaves_is_counted_shown_and_reported_once(
    hospital: Hospital, kind: str
) -> None:
    _, fault, why = BROKEN[kind]
    agent, name = hospital.agent, named(kind)
    wait_until("the failure is counted", lambda: facts(agent, name)["failures"][fault] >= 1)
    seen = facts(agent, name)
    assert why in seen["why"]
    assert seen["state"] == ("hung" if fault == "hung" else "failing")
    status, text = agent.get("/healthz")
    assert status == 503
    assert f"collectors.{name}: " in text

    hospital.coordinator.expect(NodeFinding, lambda m: m.plugin == f"collectors.{name}")
    works(agent)
    (found,) = trouble(hospital.coordinator, f"collectors.{name}")
    assert (found.name, found.severity, found.component) == ("plugin.failing", "warning", "host")
    assert why in found.summary
    assert "enabled = false" in (found.suggested_action or "")


@pytest.mark.parametrize("kind", STARTS_BADLY)
def test_a_plugin_that_cannot_be_started_is_reported_and_the_agent_starts(
    hospital: Hospital, kind: str
) -> None:
    source = f"collectors.{named(kind)}"
    assert facts(hospital.agent, named(kind))["state"] == "failed"
    found = hospital.coordinator.expect(NodeFinding, lambda m: m.plugin == source)
    assert "could not be started" in found.finding.summary
    works(hospital.agent)


def test_an_agent_stops_in_time_though_a_plugin_hangs(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = COMMON + "class Plugin(Base):\n    def collect(self): time.sleep(600)\n"
    agent = start(stage, coordinator, bad=code)
    wait_until("it hangs", lambda: facts(agent, "bad")["state"] == "hung")
    began_s = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - began_s < 5.0


def test_a_plugin_that_fails_is_called_less_and_less_often(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = COMMON + "class Plugin(Base):\n    def collect(self): raise OSError('no')\n"
    agent = start(stage, coordinator, bad=code)
    wait_until("time passes", lambda: facts(agent, "good")["calls"] >= 30)
    assert 3 <= facts(agent, "bad")["calls"] <= 10


def test_a_hanging_plugin_is_not_called_again_before_it_comes_back_and_is_then_forgiven(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    gate = stage.folder / "gate"
    code = (
        COMMON
        + f"""
class Plugin(Base):
    def collect(self):
        with open({str(gate)!r} + ".calls", "a") as out: out.write("x")
        while not os.path.exists({str(gate)!r}): time.sleep(0.02)
        return []
"""
    )
    agent = start(stage, coordinator, slow=code)
    wait_until("it hangs", lambda: facts(agent, "slow")["state"] == "hung")
    works(agent)
    assert Path(f"{gate}.calls").read_text() == "x"
    gate.touch()
    wait_until("it works again", lambda: facts(agent, "slow")["state"] == "on")
    wait_until("its end is reported", lambda: len(trouble(coordinator, "collectors.slow")) == 2)
    began, over = trouble(coordinator, "collectors.slow")
    assert (began.resolved, over.resolved) == (False, True)
    assert agent.get("/healthz")[0] == 200


def test_the_agent_can_be_stopped_while_a_plugin_hangs_in_its_start(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = COMMON + "class Plugin(Base):\n    def collect(self): return []\ntime.sleep(600)\n"
    agent = stage.agent(
        coordinator, environ=install(stage.folder / "site", bad=code), start=False
    ).start(wait=False)
    wait_until("it is on its way", agent.socket.exists)
    began_s = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - began_s < 5.0
    assert not agent.socket.exists()


def test_a_plugin_that_is_turned_off_is_not_even_imported(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    config = "[collectors.bad]\nenabled = false\n"
    agent = start(stage, coordinator, config, bad="raise RuntimeError")
    assert facts(agent, "bad")["state"] == "off"
    assert agent.get("/healthz")[0] == 200


def test_a_detector_sees_the_latest_readings_and_its_findings_begin_and_end(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = (
        COMMON
        + """
class Plugin(Base):
    def detect(self, readings, now_s):
        calls = [r.value for r in readings if r.name == "good.calls"]
        if calls and 5 <= calls[0] < 15:
            return [Finding(name="five", component="host", severity="error",
                            summary=f"{calls[0]:.0f} calls", at_s=now_s)]
        return []
"""
    )
    start(stage, coordinator, watch=code)
    wait_until("it begins and ends", lambda: len(trouble(coordinator, "detectors.watch")) == 2)
    began, over = trouble(coordinator, "detectors.watch")
    assert (began.name, began.resolved, over.resolved) == ("five", False, True)


def test_a_plugin_that_cries_all_day_is_heard_for_a_while(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = (
        COMMON
        + """
class Plugin(Base):
    def collect(self):
        self.calls += 1
        same = Finding(name="same", component="host", severity="error", summary="s", at_s=1.0)
        new = [Finding(name=f"new{self.calls}.{n}", component="host", severity="error",
                       summary="s", at_s=1.0) for n in range(50)]
        return [same, *new]
"""
    )
    agent = start(stage, coordinator, loud=code)
    wait_until("a thousand findings", lambda: facts(agent, "loud")["calls"] >= 20)
    works(agent)
    heard = trouble(coordinator, "collectors.loud")
    assert 100 <= len(heard) <= 200
    assert [f.name for f in heard].count("same") == 1
    assert "findings held back" in agent.log


def test_a_plugin_with_too_many_series_gets_some_of_them(
    stage: Stage, coordinator: FakeCoordinator
) -> None:
    code = (
        COMMON
        + """
class Plugin(Base):
    def collect(self):
        return [Reading(name="many", value=1.0, attributes={"n": str(n)}) for n in range(500)]
"""
    )
    agent = start(stage, coordinator, "[agent]\nmax_series = 100\n", many=code)
    wait_until("a hundred of them", lambda: agent.get("/metrics")[1].count("\nmany{") == 100)
    assert "too many readings" in agent.log
    works(agent)
