"""`everstep plugins` where no daemon runs: what the configuration makes of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import msgspec
import pytest
from tests.agent.stage import Stage
from tests.cli.actors import Api, Ended

Type = Callable[..., Ended]


class Slow:
    """A stranger's collector that cannot work here."""

    class Config(msgspec.Struct, frozen=True):
        interval_s: float = 1.0

    def __init__(self, _: Config) -> None:
        raise RuntimeError("no \x1b[31mcable")

    def collect(self) -> list[object]:
        return []


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more collector is installed."""

    def found(*, group: str) -> object:
        point = EntryPoint("slow", f"{__name__}:Slow", group)
        return [*entry_points(group=group), *([point] if group == "everstep.collectors" else [])]

    monkeypatch.setattr("everstep.sdk.door.entry_points", found)
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: Slow if self.name == "slow" else _load(self)
    )


_load = EntryPoint.load


def test_all_kinds_are_listed_without_any_daemon(everstep: Type) -> None:
    told = everstep("plugins")
    assert told.code == 0
    assert "no agent on" in told.err
    assert "no coordinator answers" in told.err
    assert told.err.count("\n") == 2
    lines = told.out.splitlines()[1:]
    kinds = [line.split()[0] for line in lines]
    assert kinds == sorted(kinds, key=("collectors detectors actions notifiers hooks").index)
    assert {"collectors", "detectors", "actions", "notifiers", "hooks"} == set(kinds)
    assert any(line.startswith("hooks") and "runs in ranks" in line for line in lines)


def test_json_has_the_same_fields_for_all(everstep: Type) -> None:
    told = everstep("plugins", "--json")
    for one in told.json:
        assert set(one) >= {"kind", "name", "source", "state", "why", "runs_in", "live"}
        assert one["live"] is False


def test_what_the_file_turns_off_is_off(everstep: Type, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[collectors.host]\nenabled = false\n[hooks.snapshot]\nenabled = false\n")
    told = everstep("plugins", "--config", path, "--json")
    states = {(one["kind"], one["name"]): one["state"] for one in told.json}
    assert states["collectors", "host"] == "off"
    assert states["hooks", "snapshot"] == "off"
    assert states["hooks", "progress"] == "installed"


def test_hooks_are_listed_without_importing_them(
    everstep: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(self: EntryPoint) -> object:
        assert self.group != "everstep.hooks", f"{self.name} was imported"
        return _load(self)

    monkeypatch.setattr(EntryPoint, "load", loaded)
    assert everstep("plugins", "--json").code == 0


@pytest.mark.parametrize(
    "text", ["[hooks.nothing]\n", "[collectors.host]\ninterval_s = 0\n", "[hooks]\nsnapshot = 5\n"]
)
def test_a_wrong_table_is_one_line_and_64(everstep: Type, tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    told = everstep("plugins", "--config", path)
    assert (told.code, told.out) == (64, "")
    assert f"everstep: {path}: [" in told.err.splitlines()[-1]


@pytest.mark.usefixtures("strange")
def test_a_plugin_that_cannot_start_says_why_and_costs_the_others_nothing(everstep: Type) -> None:
    told = everstep("plugins")
    assert told.code == 0
    (line,) = [line for line in told.out.splitlines() if " slow " in line]
    assert "failed" in line
    assert r"RuntimeError: no \x1b[31mcable" in line
    assert "collectors  host" in told.out


def test_a_coordinator_that_refuses_is_told_and_the_rest_is_listed(
    everstep: Type, api: Api
) -> None:
    api.token = "secret"
    told = everstep("plugins", "--coordinator", api.url)
    assert told.code == 0
    assert "a token is needed" in told.err
    assert "notifiers" in told.out


def test_the_running_agent_tells_of_its_own(everstep: Type, stage: Stage) -> None:
    agent = stage.agent(config="[collectors.host]\nenabled = false\n")
    told = everstep("plugins", "--socket", agent.socket, "--json")
    (host,) = [one for one in told.json if (one["kind"], one["name"]) == ("collectors", "host")]
    assert (host["live"], host["runs_in"], host["state"]) == (True, "agent", "off")
    assert {"calls", "failures", "interval_s", "last_s"} <= set(host)
