"""From a rank's last words to a culprit. The texts are those of torch 2.13 on gloo, shortened."""

from __future__ import annotations

import signal
from itertools import permutations

import pytest

from everstep.coordinator.incidents import Clue, ClueKind
from everstep.coordinator.verdict import (
    assign_roles,
    exception_name,
    explained_elsewhere,
    judge,
    kind_of_end,
    said_last,
)
from everstep.wire.messages import RankEnded

GLOO = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/srv/t.py", line 32, in main
[rank1]:     dist.all_reduce(x)
[rank1]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"""
KEY = """[rank2]: Traceback (most recent call last):
[rank2]:   File "/srv/t.py", line 34, in main
[rank2]: KeyError: 'input_ids'
[W1130 16:44:46.05 ProcessGroupGloo.cpp:12] [c10d] recvValue failed on SocketImpl"""
LOADER = """Traceback (most recent call last):
  File "/srv/t.py", line 15, in main
    for b in tud.DataLoader(DS(), num_workers=2): pass
  File "multiprocessing/connection.py", line 395, in _recv
ConnectionResetError: [Errno 104] Connection reset by peer"""
STORE = """Traceback (most recent call last):
torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0"""
PORT = """Traceback (most recent call last):
torch.distributed.DistNetworkError: The server socket has failed to listen, name: EADDRINUSE"""
NCCL = """[rank3]:[E1130 16:44:46.05 x.cpp:629] Watchdog caught collective operation timeout: Work
terminate called after throwing an instance of 'c10::DistBackendError'"""


def ended(
    *, code: int | None = None, sig: int | None = None, text: str | None = None, tail: str = ""
) -> RankEnded:
    return RankEnded(
        nonce="j",
        generation=1,
        rank=0,
        local_rank=0,
        pid=1,
        exit_code=code,
        signal=sig,
        at_s=0.0,
        error=text,
        stderr_tail=tail.splitlines(),
    )


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ended(code=1, text=GLOO), "broken"),
        (ended(code=1, tail=GLOO), "broken"),
        (ended(code=1, text=KEY), "error"),
        (ended(code=1, tail=KEY), "error"),
        (ended(code=1, text=LOADER), "error"),
        (ended(code=1, text=STORE), "broken"),
        (ended(code=1, text=PORT), "error"),
        (ended(sig=signal.SIGABRT, tail=NCCL), "broken"),
        (ended(sig=signal.SIGSEGV), "crash"),
        (ended(sig=signal.SIGABRT, tail="free(): invalid pointer"), "crash"),
        (ended(sig=signal.SIGKILL), "killed"),
        (ended(sig=signal.SIGTERM), "killed"),
        (ended(code=3), "exit"),
        (ended(), "unknown"),
    ],
)
def test_an_end_is_taken_for_what_its_last_words_say(end: RankEnded, kind: ClueKind) -> None:
    assert kind_of_end(end) == kind


def test_what_a_rank_said_last_is_its_exception_and_not_what_torch_adds_on_the_way_out() -> None:
    assert said_last(KEY, []) == "[rank2]: KeyError: 'input_ids'"
    assert exception_name(KEY) == "KeyError"
    assert exception_name(PORT) == "DistNetworkError"
    assert exception_name("no traceback at all") is None
    assert said_last(None, ["a", "b"]) == "a\nb"


def clue(
    kind: ClueKind,
    at_s: float,
    *,
    node: str = "a",
    rank: int | None = 0,
    error_s: float = 0.001,
    sig: int | None = None,
) -> Clue:
    return Clue(
        at_s=at_s,
        kind=kind,
        node=node,
        what=f"{kind} {rank}",
        rank=rank,
        error_s=error_s,
        signal=sig,
    )


def test_the_earliest_own_cause_is_the_root_and_cascades_never_are() -> None:
    clues = [
        clue("broken", 0.9, node="b", rank=1),
        clue("error", 1.0, node="a", rank=0),
        clue("error", 2.0, node="c", rank=2),
    ]
    for order in permutations(clues):
        verdict = judge(order)
        assert (verdict.root.node, verdict.root.rank) == ("a", 0)
        assert [c.role for c in verdict.clues] == ["cascade", "root", "cascade"]
        assert verdict.witnesses == ["b", "c"]


def test_what_the_clocks_cannot_order_is_decided_by_what_it_is() -> None:
    error = clue("error", 1.000, node="a", rank=0, error_s=0.01)
    killed = clue("killed", 1.005, node="b", rank=1, error_s=0.01, sig=9)
    assert judge([error, killed]).root.rank == 1
    later = clue("killed", 1.500, node="b", rank=1, error_s=0.01, sig=9)
    assert judge([error, later]).root.rank == 0


def test_on_one_node_there_is_one_clock_and_order_is_order() -> None:
    error = clue("error", 1.000, rank=0, error_s=0.5)
    crash = clue("crash", 1.010, rank=1, error_s=0.5, sig=11)
    assert judge([error, crash]).root.rank == 0


def test_a_sibling_stopped_after_a_cascade_is_no_cause() -> None:
    clues = [clue("broken", 1.0, rank=0), clue("killed", 1.2, rank=1, sig=signal.SIGTERM)]
    verdict = judge(clues)
    assert verdict.failure == "unknown"
    assert {c.role for c in verdict.clues} == {"cascade"}


def test_findings_confirm_and_never_accuse() -> None:
    clues = [clue("finding", 0.1, rank=None), clue("broken", 1.0, node="b", rank=1)]
    verdict = judge(clues)
    assert verdict.root.layer == "unknown"
    assert verdict.clues[0].role == "confirmation"


def test_the_same_cause_has_the_same_name_on_every_rank() -> None:
    def named(rank: int) -> str:
        error = Clue(
            at_s=1, kind="error", node="a", what="", rank=rank, exit_code=1, error="KeyError: 'x'"
        )
        return judge([error]).cause

    assert named(0) == named(3) == "KeyError:1"


@pytest.mark.parametrize("kind", ["killed", "crash", "error", "launcher", "left", "lost"])
def test_a_cause_on_another_node_explains_the_broken_ones(kind: ClueKind) -> None:
    clues = [clue(kind, 1.0, node="c", rank=2), clue("broken", 1.0, node="b", rank=1)]
    assert explained_elsewhere(clues, "a")
    assert not explained_elsewhere(clues, "c"), "its own trouble explains nothing away"


def test_a_wordless_exit_explains_others_only_when_they_say_that_a_connection_broke() -> None:
    silent = clue("exit", 1.0, node="c", rank=2)
    assert not explained_elsewhere([silent], "a")
    assert explained_elsewhere([silent, clue("broken", 1.1, node="b", rank=1)], "a")


def test_no_clue_is_no_verdict() -> None:
    assert judge([]).failure == "unknown"
    assert assign_roles([]) == []
