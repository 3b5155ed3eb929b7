"""The real server, over real sockets: agents, the HTTP API, the event stream, bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.coordinator.fake_agent import FakeAgent, until

from everstep.coordinator.config import settle
from everstep.coordinator.daemon import CannotListenError, serve
from everstep.coordinator.journal import JournalError
from everstep.sdk.config import ConfigError, ConfigFile
from everstep.wire.codec import SCHEMA
from everstep.wire.messages import (
    AgentHello,
    Evidence,
    Finding,
    FindingAck,
    NodeFinding,
    SnapshotCommitted,
)

TABLE: dict[str, Any] = {"settle_s": 0.3, "absent_s": 2.0, "rejoin_s": 1.0}


class Server:
    """One running coordinator and a client for its API."""

    def __init__(self, address: str, http: aiohttp.ClientSession, token: str) -> None:
        self.address = address
        self.agents = f"ws://{address}/v1/agent"
        self.http = http
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.http.get(f"http://{self.address}{path}", headers=self.headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        url = f"http://{self.address}{path}"
        async with self.http.post(url, json=body, headers=self.headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def job(self, run: str = "run") -> Any:
        return await self.get(f"/v1/jobs/{run}")

    async def until(self, path: str, true: Any, *, within: float = 30.0) -> Any:
        """Ask until the answer is as it should be."""
        async with asyncio.timeout(within):
            while True:
                found = await self.get(path)
                if true(found):
                    return found
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running(folder: Path, **table: Any) -> AsyncIterator[Server]:
    file = ConfigFile(tables={"coordinator": {**TABLE, **table}})
    async with (
        serve(file, listen="127.0.0.1:0", state_dir=folder) as address,
        aiohttp.ClientSession() as http,
    ):
        yield Server(address, http, str(table.get("token", "")))


@asynccontextmanager
async def agents(server: Server, names: str, **more: Any) -> AsyncIterator[list[FakeAgent]]:
    async with AsyncExitStack() as stack:
        found = [FakeAgent(server.agents, name, machine=name, **more) for name in names]
        for agent in found:
            await stack.enter_async_context(agent)
            await asyncio.wait_for(agent.up.wait(), 10)
        yield found


# ------------------------------------------------------------------------------------- the job


async def test_a_job_forms_steps_loses_a_rank_and_steps_again(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == 1)
        job = await server.until("/v1/jobs/run", lambda j: len(j["ranks"]) == 2)
        assert job["state"] == "running"
        assert job["members"] == ["a", "b"]
        assert job["spares"] == ["c"]
        assert {r["node"] for r in job["ranks"]} == {"a", "b"}
        await nodes[1].end_rank(launchers[1], sig=9)
        await until(lambda: launchers[0].running == 2)
        found = await server.until(
            "/v1/incidents", lambda i: i["incidents"] and i["incidents"][0]["closed_at_s"]
        )
        (incident,) = found["incidents"]
        assert incident["root"]["category"] == "killed"
        assert incident["resumed_at_s"] >= incident["committed_at_s"] >= incident["detected_at_s"]
        detail = await server.get(f"/v1/incidents/{incident['id']}")
        assert detail["evidence"][0]["role"] == "root"
        generations = await server.get("/v1/generations?job=run")
        assert [g["generation"] for g in generations["generations"]] == [1, 2]
        assert not launchers[1].outbox, "all acknowledged"


async def test_a_killed_launcher_is_replaced_and_the_job_ends_for_everybody(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as server, agents(server, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == 1)
        await nodes[0].kill_launcher(launchers[0])
        await until(lambda: launchers[2].running == 2)
        assert (await server.job())["members"] == ["c", "b"]
        for index in (1, 2):
            await nodes[index].succeed(launchers[index])
        await until(lambda: all(la.over for la in launchers[1:]))
        job = await server.job()
        assert job["state"] == "done"
        assert job["over"]["exit_code"] == 0


async def test_a_name_that_two_users_jobs_have_stops_neither(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        await node.launch("run", nnodes=(1, 1))
        await node.launch("run", nnodes=(1, 1), uid=4711)
        jobs = (await server.get("/v1/jobs"))["jobs"]
        assert len({j["id"] for j in jobs}) == 2
        refusal = await server.post("/v1/jobs/run/stop", {"reason": "x"}, status=409)
        assert all(j["id"] in refusal["error"] for j in jobs)
        await server.post(f"/v1/jobs/{jobs[0]['id']}/stop", {"reason": "x"})
        states = {j["id"]: j["state"] for j in (await server.get("/v1/jobs"))["jobs"]}
        assert states[jobs[0]["id"]] == "stopped"
        assert states[jobs[1]["id"]] != "stopped"


async def test_a_snapshot_is_acknowledged_only_when_it_is_in_the_journal(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        launcher = await node.launch("run", nnodes=(1, 1))
        await until(lambda: launcher.running == 1)
        taken = SnapshotCommitted(
            nonce=launcher.nonce or "",
            id="s000020-g1",
            step=20,
            generation=1,
            path=str(tmp_path),
            world_size=1,
            bytes=7,
            write_s=0.1,
        )
        await node.post(launcher, taken)
        await until(lambda: not launcher.outbox)
        with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
            rows = database.execute("select body from facts where fact = 'SnapshotTaken'")
            (body,) = [json.loads(row[0]) for row in rows]
        assert body["id"] == "s000020-g1"
        assert (await server.job())["newest_snapshot"] == "s000020-g1"


async def test_findings_are_journaled_acknowledged_and_shown_with_the_node(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        finding = Finding(
            name="disk.full",
            component="disk:/",
            severity="error",
            summary="0 bytes left",
            at_s=1.0,
            evidence=[Evidence(at_s=1.0, what="df", source="a")],
        )
        await node.send(NodeFinding(seq=5, finding=finding, plugin="collectors.host"))
        await until(lambda: any(isinstance(m, FindingAck) for m in node.other))
        shown = await server.get("/v1/nodes/a")
        assert [f["name"] for f in shown["findings"]] == ["disk.full"]
        gone = Finding(
            name="disk.full",
            component="disk:/",
            severity="error",
            summary="ok",
            at_s=2.0,
            resolved=True,
        )
        await node.send(NodeFinding(seq=6, finding=gone, plugin="collectors.host"))
        await server.until("/v1/nodes/a", lambda n: not n["findings"])


# ----------------------------------------------------------------------------------- the agents


async def test_two_live_agents_with_one_name_are_told_apart(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (first,):
        second = FakeAgent(server.agents, "a", machine="other")
        async with second:
            await until(lambda: second.refusals)
            why = second.refusals[0].why
            assert "127.0.0.1" in why
            assert "boot-a" in why
            assert "[agent]" in why
            assert not second.welcomes
            assert first.up.is_set()
            await first.kill()
            await asyncio.wait_for(second.up.wait(), 10)


async def test_an_agent_that_reconnects_takes_its_own_place(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (first,):
        again = FakeAgent(server.agents, "a", machine="a", epoch=first.hello.epoch)
        async with again:
            await asyncio.wait_for(again.up.wait(), 10)
            await until(lambda: first.closes)


async def test_an_agent_with_the_wrong_token_is_refused_and_told_what_to_do(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, token="secret") as server:
        async with FakeAgent(server.agents, "a", token="wröng") as agent:
            await until(lambda: agent.refusals)
            assert "token" in agent.refusals[0].why
        async with agents(server, "b", token="secret") as (welcome,):
            assert welcome.welcomes[0].epoch == 1


async def test_an_agent_of_a_far_schema_is_refused_with_who_is_to_upgrade(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        agent = FakeAgent(server.agents, "a")
        agent.hello = AgentHello(
            node="a",
            epoch="e",
            machine_id="m",
            boot_id="b",
            address="",
            schema=SCHEMA + 2,
        )
        async with agent:
            await until(lambda: agent.refusals)
            assert "upgrade" in agent.refusals[0].why


async def test_rubbish_of_an_agent_is_skipped_and_the_connection_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        await node.send_raw(b"\xc1 no MessagePack at all")
        await node.send(node.hello)
        await node.send_raw(b"\x81\xa4kind\xa6Future")
        before = len(node.replies)
        await until(lambda: len(node.replies) > before + 1)
        metrics = await _text(server, "/metrics")
        assert "everstep_coordinator_malformed_total 2.0" in metrics


async def test_heartbeats_are_answered_with_the_coordinators_clock(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        await until(lambda: len(node.replies) >= 2)
        status = await server.get("/v1/status")
        for reply in node.replies:
            assert reply.received_at_s <= reply.sent_at_s <= status["now_s"] + 60
        assert [r.seq for r in node.replies[:2]] == [1, 2]


# --------------------------------------------------------------------------------------- the API


async def test_an_operator_cordons_evicts_readmits_and_stops_with_a_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(1, 2)) for a in nodes]
        await until(lambda: launchers[0].running == 1)
        answer = await server.post("/v1/nodes/a/evict", {"reason": "smoke", "by": "eva"})
        assert answer["node"]["state"] == "evicted"
        await until(lambda: launchers[2].running == 2)
        plan = launchers[0].plans[-1]
        assert [(e.node, e.why) for e in plan.evicted] == [("a", "smoke")]
        await server.post("/v1/nodes/a/evict", {"reason": "again"}, status=409)
        await server.post("/v1/nodes/a/readmit", {"reason": "aired"})
        await server.until("/v1/nodes/a", lambda n: n["state"] == "healthy")
        assert (await server.post("/v1/nodes/a/cordon", {"reason": "x"}))["node"]["cordoned"]
        await server.post("/v1/nodes/a/uncordon", {"reason": "x"})
        stopped = await server.post("/v1/jobs/run/stop", {"reason": "enough"})
        assert stopped["job"]["state"] == "stopped"
        await until(lambda: all(la.over for la in launchers))
        assert {la.over.exit_code for la in launchers if la.over} == {76}
        events = (await server.get("/v1/events?limit=1000"))["events"]
        asked = [(e["verb"], e["by"]) for e in events if e["fact"] == "OperatorAsked"]
        assert asked[0] == ("evict", "eva")
        assert [v for v, _ in asked] == ["evict", "readmit", "cordon", "uncordon", "stop"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", "/v1/nodes/nobody/evict", {"reason": "x"}, 404, "everstep nodes"),
        ("POST", "/v1/nodes/nobody/evict", {}, 400, "reason"),
        ("POST", "/v1/nodes/nobody/evict", {"reason": " "}, 400, "reason"),
        ("POST", "/v1/nodes/nobody/evict", {"reason": "x", "wy": 1}, 400, "wy"),
        ("POST", "/v1/jobs/none/stop", {"reason": "x"}, 404, "everstep jobs"),
        ("POST", "/v1/incidents/99/approve", {"reason": "x"}, 404, "everstep incidents"),
        ("GET", "/v1/incidents/abc", None, 400, "number"),
        ("GET", "/v1/events?since=-3", None, 400, "since"),
        ("GET", f"/v1/events?since={'9' * 5000}", None, 400, "since"),
        ("GET", f"/v1/events/stream?since={'9' * 30}", None, 400, "number"),
        ("GET", f"/v1/incidents/{'9' * 5000}", None, 400, "number"),
        ("GET", "/v1/nothing", None, 404, "/v1/jobs"),
        ("GET", "/v1/jobs/none", None, 404, "everstep jobs"),
        ("DELETE", "/v1/jobs", None, 405, "DELETE"),
    ],
)
async def test_a_wrong_request_is_answered_with_what_is_wrong(
    tmp_path: Path, method: str, path: str, body: Any, status: int, word: str
) -> None:
    async with running(tmp_path) as server:
        url = f"http://{server.address}{path}"
        async with server.http.request(method, url, json=body) as answer:
            assert answer.status == status
            assert word in (await answer.json())["error"]


async def test_with_a_token_everything_but_healthz_asks_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, token="secret") as server:
        base = f"http://{server.address}"
        for path in ("/v1/jobs", "/metrics", "/v1/events/stream", "/v1/status"):
            async with server.http.get(base + path) as answer:
                assert answer.status == 401
                assert "token" in (await answer.json())["error"]
            async with server.http.get(base + path, headers={"Authorization": "Bearer no"}) as bad:
                assert bad.status == 401
        async with server.http.get(f"{base}/healthz") as healthy:
            assert healthy.status == 200
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/jobs HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        assert (await server.get("/v1/jobs")) == {"jobs": []}


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "ab") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == 1)
        await nodes[0].end_rank(launchers[0], sig=9)
        await server.until("/v1/incidents?open=1", lambda i: not i["incidents"])
        metrics = await _text(server, "/metrics")
        for line in (
            'everstep_coordinator_nodes{state="healthy"} 2.0',
            'everstep_coordinator_jobs{state="running"} 1.0',
            'everstep_coordinator_incidents_total{kind="failure"} 1.0',
            "everstep_coordinator_generations_total 2.0",
            "everstep_coordinator_decide_seconds_count 1.0",
            "everstep_coordinator_resume_seconds_count 1.0",
            'everstep_coordinator_recovery_seconds_count{decision="restart"} 1.0',
            "everstep_coordinator_agents_connected 2.0",
        ):
            assert line in metrics


async def test_a_jobs_time_is_a_gauge_while_it_lives_and_counted_when_it_is_over(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as server, agents(server, "ab") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: all(la.running for la in launchers))
        await server.until("/v1/jobs/run", lambda j: j["time"]["kinds"]["productive"] > 0)
        job = (await server.get("/v1/jobs"))["jobs"][0]["id"]
        time = (await server.get("/v1/jobs/run"))["time"]
        assert time["wall_s"] == pytest.approx(sum(time["kinds"].values()))
        live = await _text(server, "/metrics")
        assert f'everstep_job_time_seconds{{job="{job}",kind="productive",run="run"}}' in live
        assert f'everstep_job_goodput_ratio{{job="{job}",run="run"}}' in live
        for agent, launcher in zip(nodes, launchers, strict=True):
            await agent.succeed(launcher)
        await until(lambda: launchers[0].over)
        over = await _text(server, "/metrics")
        assert "everstep_job_time_seconds{" not in over
        assert 'everstep_coordinator_ended_jobs_time_seconds_total{kind="productive"}' in over


async def test_events_come_as_they_happen_and_a_reader_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as server, agents(server, "a") as (node,):
        url = f"http://{server.address}/v1/events/stream"
        async with server.http.get(url, params={"since": "0"}) as stream:
            first = await _next_event(stream)
            assert first["fact"] == "CoordinatorStarted"
            launcher = await node.launch("run", nnodes=(1, 1))
            names = [first["fact"]]
            while names[-1] != "PlanCommitted":
                names.append((await _next_event(stream))["fact"])
            assert names.index("JobCreated") < names.index("LauncherJoined")
        await until(lambda: launcher.running == 1)
        last = {"Last-Event-ID": str(first["seq"])}
        async with server.http.get(url, headers=last) as again:
            assert (await _next_event(again))["seq"] == first["seq"] + 1
        async with server.http.get(url, headers={"Last-Event-ID": "x"}) as wrong:
            assert wrong.status == 400


async def test_a_stop_ends_the_streams_and_the_agents_look_for_another(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        agent = FakeAgent(server.agents, "a", machine="a")
        async with agent:
            await asyncio.wait_for(agent.up.wait(), 10)
            stream = await server.http.get(f"http://{server.address}/v1/events/stream")
    # The context has ended with a stream open: nothing hung.
    stream.close()


# -------------------------------------------------------------------------------- bad beginnings


async def test_a_port_in_use_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = ConfigFile()
        with pytest.raises(CannotListenError, match=f"127.0.0.1:{port}.*--listen"):
            async with serve(file, listen=f"127.0.0.1:{port}", state_dir=tmp_path):
                pass
    async with running(tmp_path):
        pass  # the failed start has let go of the journal


async def test_two_coordinators_never_share_a_journal(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(JournalError, match="another coordinator"):
            async with running(tmp_path):
                pass


async def test_a_damaged_journal_is_not_written_to(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    journal.write_bytes(b"this is no database, it is a poem" * 100)
    with pytest.raises(JournalError, match="not a usable journal"):
        async with running(tmp_path):
            pass
    assert journal.read_bytes().startswith(b"this is no database")


async def test_a_journal_with_any_page_damaged_is_not_started_from(tmp_path: Path) -> None:
    async with running(tmp_path) as server, agents(server, "ab"):
        for _ in range(8):
            await server.post("/v1/nodes/a/cordon", {"reason": "x" * 3000})
            await server.post("/v1/nodes/a/uncordon", {"reason": "x" * 3000})
    journal = tmp_path / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("pragma wal_checkpoint(truncate)")
        (size,) = database.execute("pragma page_size").fetchone()
    whole = journal.read_bytes()
    assert len(whole) > 4 * size
    for page in range(1, 5):
        start = page * size
        journal.write_bytes(whole[:start] + b"\xa5" * size + whole[start + size :])
        with pytest.raises(JournalError, match="not a usable journal"):
            async with running(tmp_path):
                pass
    journal.write_bytes(whole)
    async with running(tmp_path) as server:
        assert [n["name"] for n in (await server.get("/v1/nodes"))["nodes"]] == ["a", "b"]


async def test_a_journal_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    async with running(tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        database.execute("update about set value = '99' where key = 'schema'")
        database.commit()
    with pytest.raises(JournalError, match="newer"):
        async with running(tmp_path):
            pass


def test_beyond_loopback_a_token_is_needed_unless_somebody_insists(tmp_path: Path) -> None:
    def settled(**table: Any) -> str:
        file = ConfigFile(tables={"coordinator": {"listen": "0.0.0.0:7070", **table}})
        return settle(file, {"HOME": "/home/u"}, root=False).token

    with pytest.raises(ConfigError, match="token"):
        settled()
    assert settled(insecure=True) == ""
    assert settled(token="t") == "t"
    secret = tmp_path / "token"
    secret.write_text("from a file\n")
    assert settled(token_file=str(secret)) == "from a file"
    secret.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        settled(token_file=str(secret))


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"setle_s": 1}, "settle_s"),
        ({"mode": "maybe"}, "mode"),
        ({"silence": {"silent": 3}}, "silent"),
        ({"absent_s": -1}, "absent_s"),
        ({"listen": "nonsense"}, "host:port"),
        ({"token": "a", "token_file": "b"}, "exclude"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_key(table: dict[str, Any], word: str) -> None:
    file = ConfigFile(tables={"coordinator": table})
    with pytest.raises(ConfigError, match=word):
        settle(file, {"HOME": "/home/u"}, root=False)


async def _text(server: Server, path: str) -> str:
    async with server.http.get(f"http://{server.address}{path}", headers=server.headers) as answer:
        return await answer.text()


async def _next_event(stream: aiohttp.ClientResponse) -> Any:
    async with asyncio.timeout(20):
        while True:
            line = (await stream.content.readline()).decode()
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
