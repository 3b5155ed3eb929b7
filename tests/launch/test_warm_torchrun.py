"""Warm ranks under unmodified torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.launch.scripted import Cluster, Launcher, alive
from tests.waiting import wait_until

from everstep.launch import reaper
from everstep.wire.messages import GroupSucceeded, Join, RankEnded, RanksStarted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def sleeper(cluster: Cluster) -> Path:
    path = cluster.folder / "sleeper.py"
    path.write_text(
        "import os, sys, time\n"
        "env = os.environ\n"
        "name = f\"{env['TMPDIR']}/{env['RANK']}-g{env['EVERSTEP_GENERATION']}\"\n"
        "with open(name + '.new', 'w') as out:\n"
        "    print('torch' in sys.modules, env.get('PYTHON_EXEC'), sys.executable, file=out)\n"
        "os.rename(name + '.new', name)\n"
        "while not os.path.exists(os.environ['TMPDIR'] + '/stop'): time.sleep(0.05)\n"
    )
    return path


def told(cluster: Cluster, rank: int, generation: int) -> list[str]:
    """Return what a rank wrote of itself, once it has."""
    path = cluster.folder / f"{rank}-g{generation}"
    wait_until(f"rank {rank} of generation {generation}", path.exists)
    return path.read_text().split()


def processes(launcher: Launcher) -> dict[int, str]:
    """Return the children of a launcher, by name."""
    pid = launcher.process.pid
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/comm").read_text().strip()
    return found


def test_ranks_are_warm_from_the_start_and_after_a_failure(cluster: Cluster, sleeper: Path) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", sleeper, nproc=2)
    a.expect(Join)
    cluster.commit(1, ["a"], nproc=2)
    pids = a.expect(RanksStarted).pids
    for rank in range(2):
        warm, python_exec, executable = told(cluster, rank, 1)
        assert (warm, python_exec) == ("True", "None"), launcher.text()
        assert "everstep-" not in executable
    shims = [pid for pid, name in processes(launcher).items() if name == reaper.SHIM]
    assert len(shims) == 2
    assert not set(pids) & set(shims)

    os.kill(pids[1], signal.SIGSEGV)
    ended = a.expect(RankEnded)
    assert (ended.pid, ended.rank, ended.signal) == (pids[1], 1, signal.SIGSEGV)
    cluster.commit(2, ["a"], nproc=2)
    again = a.expect(RanksStarted).pids
    assert told(cluster, 1, 2)[0] == "True"
    wait_until("the end of the first ones", lambda: not any(map(alive, pids)))
    (cluster.folder / "stop").touch()
    a.expect(GroupSucceeded)
    cluster.over()
    assert launcher.wait() == 0
    wait_until("nothing is left", lambda: not any(map(alive, [*again, *shims])))
    assert not list(cluster.folder.glob("everstep-*"))


def test_a_killed_nursery_is_a_failure_of_its_ranks_and_the_next_ones_are_warm_again(
    cluster: Cluster, sleeper: Path
) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", sleeper)
    a.expect(Join)
    cluster.commit(1, ["a"])
    a.expect(RanksStarted)
    told(cluster, 0, 1)
    (nursery,) = (p for p, name in processes(launcher).items() if name == "everstep-warm")
    os.kill(nursery, signal.SIGKILL)
    assert a.expect(RankEnded).signal == signal.SIGKILL
    cluster.commit(2, ["a"])
    a.expect(RanksStarted)
    assert told(cluster, 0, 2)[0] == "True"
    assert f"nursery {nursery} has died, and with it 1 ranks" in launcher.text()
    (cluster.folder / "stop").touch()
    a.expect(GroupSucceeded)
    cluster.over()
    assert launcher.wait() == 0


def test_a_killed_launcher_leaves_no_rank_no_shim_no_nursery_and_no_folder(
    cluster: Cluster, sleeper: Path
) -> None:
    a = cluster.node("a")
    launcher = cluster.torchrun("a", sleeper, nproc=2)
    a.expect(Join)
    cluster.commit(1, ["a"], nproc=2)
    pids = a.expect(RanksStarted).pids
    told(cluster, 1, 1)
    everybody = [*pids, *processes(launcher)]
    assert list(cluster.folder.glob("everstep-*/pool"))
    launcher.kill()
    wait_until("their ends", lambda: not any(map(alive, everybody)))
    wait_until("no folder", lambda: not list(cluster.folder.glob("everstep-*")))


@pytest.mark.parametrize(
    ("environ", "says"),
    [({"EVERSTEP_WARM": "0"}, None), ({"PYTHON_EXEC": "python3"}, "PYTHON_EXEC=python3 is to run")],
)
def test_without_a_pool_ranks_start_as_ever(
    cluster: Cluster,
    sleeper: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    says: str | None,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    a = cluster.node("a")
    launcher = cluster.torchrun("a", sleeper)
    a.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = a.expect(RanksStarted).pids
    assert told(cluster, 0, 1)[0] == "False"
    assert pid in processes(launcher)
    assert "everstep-warm" not in processes(launcher).values()
    assert ("ranks start cold" in launcher.text()) == (says is not None)
    assert says is None or says in launcher.text()


def test_with_numa_binding_ranks_are_torchruns_own(
    cluster: Cluster, sleeper: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This machine may have neither numactl nor a GPU: both are put in torch's way."""
    numactl = tmp_path / "numactl"
    numactl.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    numactl.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'torch.distributed.run' in sys.orig_argv:\n"
        "    import torch.numa.binding as binding\n"
        "    binding._get_logical_cpus_to_bind_to = lambda **_: {0}\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    a = cluster.node("a")
    launcher = cluster.torchrun("a", sleeper, "--numa-binding=node")
    a.expect(Join)
    cluster.commit(1, ["a"])
    (pid,) = a.expect(RanksStarted).pids
    assert told(cluster, 0, 1)[0] == "False"
    assert pid in processes(launcher)
    assert "ranks start cold: --numa-binding" in launcher.text()
