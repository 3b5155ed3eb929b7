"""Everything together: coordinator, agents, stock torchrun, plain scripts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import wait_until

from everstep.cli.api import Api, ApiError
from everstep.cli.demo.cluster import Cluster
from everstep.cli.demo.faults import rank_pids

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

DEADLINE_S = 90.0
THIRTY_SECOND_WAIT = "Unable to shutdown process"


def api(cluster: Cluster) -> Api:
    return Api(cluster.url, cluster.api_token)


def steps(out: Path, pattern: str) -> int:
    """The steps of the slowest rank among the files that match, 0 when there is none."""
    return min((len(p.read_text().splitlines()) for p in out.glob(pattern)), default=0)


def newest_generation(out: Path) -> int:
    return max((int(p.name.rsplit("-g", 1)[1]) for p in out.glob("rank*-g*")), default=0)


def text(cluster: Cluster, name: str) -> str:
    path = cluster.log(name)
    return path.read_text(errors="replace") if path.exists() else ""


def nobody_waited(cluster: Cluster) -> bool:
    logs = cluster.log("x").parent.glob("*.log")
    return not any(THIRTY_SECOND_WAIT in p.read_text(errors="replace") for p in logs)


def all_ended_with(cluster: Cluster, code: int) -> bool:
    launchers = [p for n in cluster.nodes.values() for p in n.launchers.values()]
    return [p.wait(DEADLINE_S) for p in launchers] == [code] * len(launchers)


def evicted(cluster: Cluster) -> list[str]:
    return [n["name"] for n in api(cluster).get("nodes")["nodes"] if n["state"] == "evicted"]


def test_two_jobs_share_a_node_and_neither_feels_the_other(
    cluster: Cluster, stepping: Path, out: Path
) -> None:
    node = cluster.add_node("a")
    for run in ("one", "two"):
        (out / run).mkdir()
        cluster.launch(node, run, ["--nnodes=1", str(stepping), str(out / run)])
    for run in ("one", "two"):
        wait_until(f"steps of {run}", lambda run=run: steps(out / run, "rank0-*") > 5)  # type: ignore[misc]
    pids = [pid for _, pid in rank_pids(node)]
    one = next(
        p for p in pids if str(out / "one").encode() in Path(f"/proc/{p}/cmdline").read_bytes()
    )
    os.kill(one, signal.SIGKILL)
    wait_until("the second generation of one", lambda: newest_generation(out / "one") == 2)
    wait_until("its steps", lambda: steps(out / "one", "rank0-*-g2") > 2)
    assert newest_generation(out / "two") == 1
    for run in ("one", "two"):
        (out / run / "stop").touch()
    assert all_ended_with(cluster, 0)
    assert nobody_waited(cluster)


def test_a_killed_node_is_replaced_by_the_spare_and_named_with_evidence(
    cluster: Cluster, stepping: Path, out: Path
) -> None:
    nodes = [cluster.add_node(n) for n in "abc"]
    for node in nodes:
        cluster.launch(node, "run", ["--nnodes=2:2", str(stepping), str(out)])
    wait_until("steps", lambda: steps(out, "rank*-of-2-g1") > 5)
    member = next(n for n in nodes if rank_pids(n))
    cluster.kill_node(member)
    wait_until("steps of generation 2", lambda: steps(out, "rank*-of-2-g2") > 5)
    assert evicted(cluster) == [member.name]
    found = api(cluster).get("incidents")["incidents"]
    (summary,) = [i for i in found if i["kind"] == "failure"]
    incident = api(cluster).get(f"incidents/{summary['id']}")
    assert incident["decision"]["evicted"] == [member.name]
    assert len(incident["evidence"]) >= 2
    (out / "stop").touch()
    codes = [n.launchers["run"].wait(DEADLINE_S) for n in nodes if n is not member]
    assert codes == [0, 0]
    assert nobody_waited(cluster)


def test_a_frozen_node_is_evicted_and_harms_nobody_when_it_thaws(
    cluster: Cluster, out: Path
) -> None:
    nodes = [cluster.add_node(n) for n in "abc"]
    arguments = ["--nnodes=2:2", "-m", "tests.e2e.with_page", str(out)]
    for node in nodes:
        cluster.launch(node, "run", arguments)
    wait_until("steps", lambda: steps(out, "rank*-of-2-g1") > 30)
    frozen = next(n for n in nodes if rank_pids(n))
    old = [pid for _, pid in rank_pids(frozen)]
    cluster.freeze(frozen)
    wait_until("steps of generation 2", lambda: steps(out, "rank*-of-2-g2") > 5)
    assert evicted(cluster) == [frozen.name]
    cluster.thaw(frozen)
    wait_until("the old ranks' end", lambda: not {p for _, p in rank_pids(frozen)} & set(old))
    wait_until("parked", lambda: "evicted from run" in text(cluster, f"{frozen.name}-run"))
    before = newest_generation(out)
    (out / "stop").touch()
    assert all_ended_with(cluster, 0)
    assert newest_generation(out) == before
    assert nobody_waited(cluster)


def test_training_depends_neither_on_the_coordinator_nor_on_the_agent(
    cluster: Cluster, stepping: Path, out: Path
) -> None:
    nodes = [cluster.add_node(n) for n in "ab"]
    for node in nodes:
        cluster.launch(node, "run", ["--nnodes=2:2", str(stepping), str(out)])
    wait_until("steps", lambda: steps(out, "rank*-of-2-g1") > 5)
    cluster.kill_coordinator()
    cluster.kill_agent(nodes[0])
    cluster.cables.set_cut(nodes[1].cable, cut=True)
    before = steps(out, "rank*-of-2-g1")
    wait_until("steps without a monitor", lambda: steps(out, "rank*-of-2-g1") > before + 150)
    cluster.start_coordinator()
    cluster.start_agent(nodes[0])
    cluster.cables.set_cut(nodes[1].cable, cut=False)

    def all_back() -> bool:
        try:
            found = api(cluster).get("nodes")["nodes"]
        except ApiError:
            return False
        return sum(bool(n["connected"]) for n in found) == 2

    wait_until("both agents back", all_back)
    assert newest_generation(out) == 1
    assert evicted(cluster) == []
    (out / "stop").touch()
    assert all_ended_with(cluster, 0)
    assert newest_generation(out) == 1


def test_a_script_that_raises_at_once_is_stopped_after_two_cycles_with_its_own_code(
    cluster: Cluster, out: Path
) -> None:
    script = out / "bug.py"
    script.write_text(
        "import sys\n"
        "open(sys.argv[1] + '/cycles', 'a').write('x')\n"
        "sys.stderr.write('ImportError: no module named flahs_attn\\n')\n"
        "sys.exit(17)\n"
    )
    node = cluster.add_node("a")
    launcher = cluster.launch(node, "bug", ["--nnodes=1", str(script), str(out)])
    assert launcher.wait(DEADLINE_S) == 17
    assert len((out / "cycles").read_text()) <= 2
    assert "flahs_attn" in text(cluster, "a-bug")
    assert "in next_rendezvous" not in text(cluster, "a-bug")
    assert nobody_waited(cluster)


def test_too_few_nodes_end_with_69_and_the_reason(
    cluster: Cluster, stepping: Path, out: Path
) -> None:
    node = cluster.add_node("a")
    launcher = cluster.launch(
        node, "few", ["--nnodes=2", "--rdzv-conf=join_timeout_s=3", str(stepping), str(out)]
    )
    assert launcher.wait(DEADLINE_S) == 69
    assert "1 of" in text(cluster, "a-few")


def test_a_rank_that_dies_in_teardown_after_another_has_finished_is_finished_alone(
    cluster: Cluster, out: Path
) -> None:
    script = out / "teardown.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "mark = sys.argv[1] + '/died'\n"
        "if os.environ['RANK'] == '1' and not os.path.exists(mark):\n"
        "    time.sleep(3)\n"
        "    open(mark, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    for name in "ab":
        cluster.launch(cluster.add_node(name), "end", ["--nnodes=2:2", str(script), str(out)])
    assert all_ended_with(cluster, 0)
    assert (out / "died").exists()


def test_two_ranks_on_one_launcher_one_stopped_and_one_killed(
    cluster: Cluster, stepping: Path, out: Path
) -> None:
    node = cluster.add_node("a")
    cluster.launch(node, "run", ["--nnodes=1", "--nproc-per-node=2", str(stepping), str(out)])
    wait_until("steps", lambda: steps(out, "rank*-of-2-g1") > 5)
    (_, first), (_, second) = rank_pids(node)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    wait_until("steps of generation 2", lambda: steps(out, "rank*-of-2-g2") > 5)
    (out / "stop").touch()
    assert all_ended_with(cluster, 0)
    assert nobody_waited(cluster)


def test_an_operator_stops_a_job(cluster: Cluster, stepping: Path, out: Path) -> None:
    nodes = [cluster.add_node(n) for n in "ab"]
    for node in nodes:
        cluster.launch(node, "run", ["--nnodes=2:2", str(stepping), str(out)])
    wait_until("steps", lambda: steps(out, "rank*-of-2-g1") > 5)
    job = api(cluster).get("jobs")["jobs"][0]["id"]
    api(cluster).post(f"jobs/{job}/stop", reason="a test")
    assert all_ended_with(cluster, 76)
    assert "a test" in text(cluster, "a-run")


def test_without_an_agent_torchrun_ends_with_69_and_says_how_to_start_one(
    stepping: Path, out: Path
) -> None:
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "torchrun", "--rdzv-id=x", str(stepping), str(out)],
        env={**os.environ, "EVERSTEP_SOCKET": str(out / "none.sock")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 69
    assert "everstep agent --with-coordinator" in done.stderr
    assert "Traceback" not in done.stderr
