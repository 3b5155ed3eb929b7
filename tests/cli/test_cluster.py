"""Verbs that ask the coordinator, against a real one that has seen a job fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from tests.cli.actors import Ended, Everstep
from tests.cli.scene import TOKEN, Scene
from tests.waiting import wait_until

from everstep.cli.api import Api, ApiError
from everstep.cli.demo.ports import free_port

pytestmark = pytest.mark.e2e

Type = Callable[..., Ended]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """A node whose job failed once and runs again."""
    made = Scene()
    try:
        launcher = made.launcher(made.agent())
        launcher.join("my-job")
        launcher.run(1)
        launcher.fail(1)
        launcher.run(2)
        yield made
    finally:
        made.close()


@pytest.fixture
def fresh() -> Iterator[Scene]:
    """A cluster of one's own, for who changes it."""
    made = Scene()
    yield made
    made.close()


@pytest.fixture
def typed(everstep: Everstep, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Everstep:
    monkeypatch.setenv("EVERSTEP_COORDINATOR", scene.coordinator.url)
    monkeypatch.setenv("EVERSTEP_TOKEN", TOKEN)
    return everstep


def at(scene: Scene) -> list[str]:
    return ["--coordinator", scene.coordinator.url, "--token", TOKEN]


def test_status_shows_everything_on_one_screen(typed: Type, scene: Scene) -> None:
    told = typed("status")
    assert (told.code, told.err) == (0, "")
    assert f"coordinator  {scene.coordinator.url}, everstep " in told.out
    assert re.search(r"^nodes        1: 1 \w+$", told.out, re.MULTILINE)
    assert re.search(r"^jobs: 1: 1 r(unning|ecovering)$", told.out, re.MULTILINE)
    assert re.search(r"my-job +r\w+ +2 +1 of 1 ", told.out)
    assert "open incidents: " in told.out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["status"], "coordinator"),
        (["nodes"], "nodes"),
        (["nodes", "show", "n1"], "machine_id"),
        (["jobs"], "jobs"),
        (["jobs", "show", "my-job"], "generations"),
        (["incidents"], "incidents"),
        (["incidents", "--job", "my-job", "--limit", "1"], "incidents"),
        (["incidents", "show", "1"], "clues"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_json_is_what_the_api_gives(typed: Type, words: list[str], key: str) -> None:
    told = typed(*words, "--json")
    assert (told.code, told.err) == (0, "")
    assert key in told.json


def test_options_may_stand_before_the_inner_verb(everstep: Type, scene: Scene) -> None:
    told = everstep("nodes", "--json", *at(scene), "show", "n1")
    assert told.code == 0
    assert told.json["name"] == "n1"


def test_nodes_are_listed_and_shown(typed: Type) -> None:
    listed = typed("nodes")
    head, line = listed.out.splitlines()
    assert head.split()[:3] == ["NAME", "STATE", "HEARD"]
    assert line.startswith("n1    ")
    clock = re.compile(r"^clock +[+-]\d+\.\d+ s, give or take", re.MULTILINE)
    # The agent knows its clock's offset from the answer to its first heartbeat.
    wait_until("the clock offset of n1", lambda: clock.search(typed("nodes", "show", "n1").out))
    assert typed("nodes", "show", "n1").code == 0


def test_a_job_is_shown_with_all_its_history(typed: Type) -> None:
    shown = typed("jobs", "show", "my-job")
    assert shown.code == 0
    assert "command     train.py\n" in shown.out
    assert "generation  2: n1\n" in shown.out
    for part in ("launchers", "generations", "incidents"):
        assert f"\n\n{part}\n" in shown.out
    assert "no snapshot yet" in shown.out


def test_an_incident_is_told_in_order_of_time(typed: Type) -> None:
    wait_until(
        "the plan after the incident is in force",
        lambda: typed("incidents", "show", "1", "--json").json["committed_at_s"] is not None,
    )
    shown = typed("incidents", "show", "1")
    assert shown.code == 0
    roles = re.findall(r"^[\d.]+ s +(\w+) ", shown.out, re.MULTILINE)
    assert roles[:3] == ["root", "opened", "decided"]
    assert "planned" in roles
    assert "culprit     n1 rank 0\n" in shown.out
    assert "ValueError: \\x1b[2Jno such shard: 7\n" in shown.out
    assert "\x1b" not in shown.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nodes", "show", "n9"], "no node 'n9' was ever heard"),
        (["nodes", "show", "../jobs"], "no node '../jobs' was ever heard"),
        (["jobs", "show", "n9"], "no job 'n9'"),
        (["incidents", "show", "77"], "no incident 77"),
        (["incidents", "show", "x"], "see `everstep incidents show --help`"),
        (["incidents", "--job", "n9"], "no job 'n9'"),
        (["jobs", "stop", "n9", "--reason", "x"], "no job 'n9'"),
        (["evict", "n9", "--reason", "x"], "no node 'n9' was ever heard"),
        (["evict", "n1"], "'--reason'; see `everstep evict --help`"),
        (["evict", "n1", "--reason", " "], "a reason is needed"),
        (["readmit", "n1", "--reason", "x"], "n1 is healthy: there is nothing to readmit"),
        (["uncordon", "n1", "--reason", "x"], "n1 is not cordoned already"),
        (["incidents", "approve", "1", "--reason", "x"], "incident 1 waits for nobody"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_one_line_and_64(typed: Type, words: list[str], says: str) -> None:
    told = typed(*words)
    assert (told.code, told.out) == (64, "")
    assert told.err.startswith("everstep: ")
    assert told.err.count("\n") == 1
    assert says in told.err


def test_the_wrong_token_is_one_line_and_64(everstep: Type, scene: Scene) -> None:
    told = everstep("status", "--coordinator", scene.coordinator.url, "--token", "guessed")
    assert (told.code, told.out) == (64, "")
    assert "its token is another one: give it with --token or EVERSTEP_TOKEN" in told.err


def test_a_node_is_cordoned_evicted_and_taken_in_again(everstep: Type, fresh: Scene) -> None:
    fresh.agent("n1")
    where = [*at(fresh), "--reason", "a test"]
    wait_until("n1 is known", lambda: everstep("nodes", "show", "n1", *at(fresh)).code == 0)
    assert everstep("cordon", "n1", *where) == Ended(0, "n1: cordoned\n", "")
    assert everstep("evict", "n1", *where) == Ended(0, "n1: evicted, cordoned\n", "")
    listed = everstep("nodes", *at(fresh))
    assert re.search(r"n1 +evicted, cordoned .* a test \(\w+@", listed.out)
    assert "evicted" in everstep("status", *at(fresh)).out
    assert everstep("uncordon", "n1", *where).out == "n1: evicted\n"
    answer = everstep("readmit", "n1", *where, "--json")
    assert answer.json["node"]["state"] in ("testing", "healthy")
    wait_until(
        "n1 passes its tests",
        lambda: everstep("nodes", *at(fresh), "--json").json["nodes"][0]["state"] == "healthy",
    )


def test_a_job_is_stopped(everstep: Type, fresh: Scene) -> None:
    launcher = fresh.launcher(fresh.agent("n1"))
    launcher.join("my-job")
    launcher.run(1)
    told = everstep("jobs", "stop", "my-job", "--reason", "wrong rate", *at(fresh))
    assert told == Ended(0, f"my-job ({launcher.nonce}): stopped\n", "")
    shown = everstep("jobs", "show", "my-job", *at(fresh))
    assert re.search(r"why +stopped by .*: wrong rate", shown.out)
    assert "exit code   76\n" in shown.out
    assert "1: 1 stopped" in everstep("status", *at(fresh)).out


def test_without_a_coordinator_status_tells_what_the_agent_knows(
    everstep: Type, fresh: Scene
) -> None:
    agent = fresh.agent("n1")
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--socket", agent.socket]
    told = everstep("status", *where)
    assert told.code == 69
    assert told.err.count("\n") == 1
    assert "no coordinator answers on http://127.0.0.1:" in told.err
    assert told.out.startswith("What the agent of this machine knows:\nnode         n1, everstep ")
    wait_until(
        "the agent has found its coordinator",
        lambda: "is reached by the agent: name it" in everstep("status", *where).out,
    )
    facts = everstep("status", *where, "--json")
    assert facts.code == 69
    assert facts.json["coordinator"] is None
    assert facts.json["agent"]["node"] == "n1"


def test_a_coordinator_that_stands_still_is_told_from_one_that_is_gone(fresh: Scene) -> None:
    fresh.coordinator.freeze()
    with pytest.raises(ApiError, match=r"connected, but no answer within 0\.5 s"):
        Api(fresh.coordinator.url, TOKEN, timeout_s=0.5).get("nodes")


def test_plugins_of_both_daemons_are_shown_live(typed: Type, scene: Scene) -> None:
    socket = scene.stage.folder / "n1" / "agent.sock"
    told = typed("plugins", "--socket", socket, "--json")
    assert (told.code, told.err) == (0, "")
    live = {(one["kind"], one["name"]): one["live"] for one in told.json}
    assert live["collectors", "host"]
    assert live["notifiers", "journal"]
    assert not live["hooks", "snapshot"]
    assert re.search(
        r"collectors +host +agent +on +\d+ +0 +[\d.]+ ms", typed("plugins", "--socket", socket).out
    )
