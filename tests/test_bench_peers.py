"""The benchmarks' peers: which are there, what is said of the others, how a save is judged.

The peers themselves are not needed here.
"""

from __future__ import annotations

import doctest
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from tests.bench import form, mttr
from tests.bench.contestants import Everstep, Shape
from tests.bench.peers import install, snapshot_loop, snapshots, venvs
from tests.bench.peers.launchers import LAUNCHERS, Launchers
from tests.bench.peers.venvs import PEERS, Peer

FIGURES = {
    f"{prefix}{name}_s"
    for prefix in ("", "one_node_")
    for name in (
        "rank_kill_all",
        "rank_kill_restart",
        "rank_kill_survivor",
        "rank_stop_all",
        "rank_stop_survivor",
    )
} | {"node_freeze_s", "one_node_node_freeze_s"}


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_PEERS", str(tmp_path / "peers"))


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in its stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has it; more would fight over a busy machine's cores
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------- what is there


def test_a_peer_that_was_never_installed_says_how_to_install_it() -> None:
    assert PEERS["nvrx"].missing() == "not installed: run make bench-peers"


def test_a_peer_is_there_only_as_its_requirements_say_now() -> None:
    peer = PEERS["nvrx"]
    peer.folder.mkdir(parents=True)
    peer.mark.write_text(peer.requirements.read_text())
    assert peer.missing() == ""
    peer.mark.write_text("torch==1.0\n")
    assert peer.missing()


def test_every_peer_has_pinned_requirements_and_the_tested_torch() -> None:
    tested = (venvs.ROOT / "constraints.txt").read_text().split()
    for peer in PEERS.values():
        lines = [r for r in peer.requirements.read_text().splitlines() if not r.startswith("#")]
        assert all("==" in line for line in lines), peer.name
        assert {line for line in lines if line.startswith("torch==")} <= set(tested), peer.name


def test_a_peer_that_cannot_be_installed_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(venvs, "HERE", tmp_path)
    (tmp_path / "lost.txt").write_text(f"{tmp_path}/nowhere-1.0-py3-none-any.whl\n")
    lost = Peer("lost", ())
    assert not install.bring(lost)
    assert "nowhere-1.0" in lost.missing()
    assert lost.missing().startswith("not installed: pip install")
    assert "nowhere-1.0" in capsys.readouterr().err


def test_a_peer_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(install.__file__)), "nvrxx"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no such peer: nvrxx; there are nvrx, dlrover, torchft" in done.stderr
    assert not capsys.readouterr().out


@pytest.mark.parametrize("module", [install, snapshots], ids=lambda m: m.__name__)
def test_the_examples_hold(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


# ----------------------------------------------------------------------------- bringing runs back


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_a_peer_cannot_do_is_a_figure_of_the_benchmark(name: str) -> None:
    kind = LAUNCHERS[name]
    assert {*kind.cannot, *kind.same, *kind.same.values(), *kind.trainer} <= FIGURES
    assert all(kind.cannot.values())


def test_a_peer_that_is_not_there_has_null_and_the_reason_for_every_figure(tmp_path: Path) -> None:
    found = form.Form("mttr", {}, runs=1, machine="here")
    for fault in mttr.FAULTS:
        only = {"dlrover": LAUNCHERS["dlrover"]}
        mttr.measure(found, fault, tmp_path, tmp_path / "data", 1, only)
    mttr.settle(found, "dlrover", LAUNCHERS["dlrover"], [f.figure for f in mttr.FAULTS])
    assert {f.figure for f in mttr.FAULTS} <= found.peers["dlrover"].keys()
    assert set(found.peers["dlrover"].values()) == {None}
    assert found.why["dlrover.rank_kill_all_s"] == "not installed: run make bench-peers"


def test_a_figure_that_is_another_ones_is_taken_over_with_a_word() -> None:
    found = form.Form("mttr", {}, runs=1, machine="here")
    found.put_peer("torchrun", "rank_kill_restart_s", 2.9)
    mttr.settle(found, "torchrun", LAUNCHERS["torchrun"], [f.figure for f in mttr.FAULTS])
    assert found.peers["torchrun"]["rank_kill_all_s"] == 2.9
    assert found.why["torchrun.rank_kill_all_s"] == "it knows one way only: rank_kill_restart_s"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in found.why["torchrun"]


class Sleepers(Launchers):
    """Each node is a process with a child in a session of its own; one other stands beside them."""

    _CODE = (
        "import subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "subprocess.Popen(sleep, start_new_session=True).wait()"
    )

    def prepare(self) -> None:
        self.start_other(self.command(0), "other")

    def command(self, node: int) -> list[str]:
        del node
        return [sys.executable, "-c", self._CODE]

    def wait_for_port(self) -> None:
        """They meet nowhere."""


def test_nodes_are_told_apart_and_nothing_outlives_the_run(tmp_path: Path) -> None:
    run = Sleepers(tmp_path, Shape(nodes=1, ranks=1, spares=1), tmp_path / "run.toml")
    with run:
        mttr.wait(lambda: all(len(pids) == 2 for pids in run.nodes()), 60, "both nodes' processes")
        nodes = run.nodes()
        assert len(nodes) == 2
        assert not set(nodes[0]) & set(nodes[1])
        scratch = Path(run._environ["TMPDIR"])
        assert scratch.is_dir()
    assert run.nodes() == [[], []]
    assert not scratch.exists()


def test_a_launcher_that_never_listens_is_a_run_that_did_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Sleepers):
        wait_for_port = Launchers.wait_for_port

    monkeypatch.setattr("tests.bench.peers.launchers._START_S", 0.2)
    fault = mttr.Fault("rank_kill_all_s", mttr.TWO_NODES, mttr.kill_rank)
    data = tmp_path / "data"
    one = mttr.attempt(Deaf, fault, tmp_path / "run", data, random.Random(1))
    assert one.resumed_s is None
    assert one.why.startswith("Deaf did not start; see ")


def test_everstep_is_a_contestant_like_the_others() -> None:
    assert mttr.CONTESTANTS["everstep"] is Everstep
    assert set(Everstep.cannot) <= FIGURES


# --------------------------------------------------------------------------------------- saves


class Copying:
    """Saves a copy taken at the call."""

    def __init__(self, training: snapshot_loop.Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.saved: snapshot_loop.State = {}
        self.waited = 0

    def start(self, number: int) -> None:
        del number
        self.saved = {name: tensor.clone() for name, tensor in self.training.state.items()}

    def staged(self) -> None:
        self.waited += 1

    def done(self) -> bool:
        return self.waited % 3 == 0

    def files(self, number: int) -> Path:
        return self.folder / str(number)

    def load(self, number: int) -> snapshot_loop.State:
        del number
        return self.saved

    def close(self) -> None:
        """Holds nothing."""


class Torn(Copying):
    """Takes no copy: what it holds changes with the training."""

    def start(self, number: int) -> None:
        del number
        self.saved = self.training.state


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("saver", "right"), [(Copying, True), (Torn, False)])
def test_a_save_that_is_not_the_state_at_the_call_is_found_out(
    saver: type[Copying], right: bool, tmp_path: Path
) -> None:
    training = snapshot_loop.Training(0.004)
    saves = list(snapshot_loop.measure(training, saver(training, tmp_path), repeats=2))
    assert [save.consistent for save in saves] == [right, right]
    assert all(save.blocked_s <= save.ended_s <= save.durable_s for save in saves)


@pytest.mark.usefixtures("group")
def test_every_page_of_the_state_changes_in_a_step() -> None:
    training = snapshot_loop.Training(0.004)
    before = {name: tensor.clone() for name, tensor in training.state.items()}
    training.step()
    for name, tensor in training.state.items():
        pages = (tensor != before[name]).view(-1, 1024)
        assert pages.any(dim=1).all()
    assert torch.equal(training.expected(), tensor)


def test_the_rank_that_is_worst_off_counts_and_one_torn_save_spoils_all(tmp_path: Path) -> None:
    def save(blocked_s: float, consistent: bool) -> dict[str, float]:
        numbers = ("ended_s", "durable_s", "lost_s", "step_s", "slowdown", "median_slowdown")
        return {"blocked_s": blocked_s, "consistent": consistent, **dict.fromkeys(numbers, 1.0)}

    asked = snapshot_loop.Asked("any", 2.0, 3, tmp_path)
    quick = [save(0.1, True)] * 3
    slow = [save(0.2, True), save(0.4, True), save(9.0, False)]
    found = snapshot_loop.summary(asked, [quick, slow])
    assert found["blocked_s"] == 0.4
    assert found["blocked_s_per_gb"] == 0.2
    assert found["consistent"] is False
    assert found["ranks"] == 2


def test_a_method_without_its_peer_tells_why() -> None:
    found = snapshots.run("nvrx_fork", size_gb=1.0, ranks=1, repeats=1)
    assert found == {"method": "nvrx_fork", "why": "not installed: run make bench-peers"}


@pytest.mark.e2e
def test_torchs_own_asynchronous_checkpoint_is_measured() -> None:
    found = snapshots.run("dcp_async_thread", size_gb=0.01, ranks=2, repeats=1)
    assert found["consistent"] is True
    assert found["ranks"] == 2
    assert 0 < found["blocked_s_per_gb"] < 100
    assert found["durable_s"] >= found["ended_s"] > 0
