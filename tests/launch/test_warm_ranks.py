"""A rank that was forked is, to its script and to torchrun, one that was started cold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.scripted import alive
from tests.launch.warmed import SUBJECT, Warmed, environment, finish, ready
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def warmed() -> Iterator[Warmed]:
    made = Warmed([str(SUBJECT)], environment(), Path("/tmp"))
    yield made.warm()
    made.close()
    assert made.pool.nurseries() == []
    assert not made.pool.folder.exists()


@pytest.mark.parametrize("arguments", [("a", ""), ("--lr", "1e-3"), ("\udcfc",)])
def test_it_sees_what_a_cold_one_sees(warmed: Warmed, arguments: tuple[str, ...]) -> None:
    warm, cold = warmed.both("told", *arguments, umask=0o27)
    assert json.loads(warm.out) == json.loads(cold.out)


def test_it_has_the_shims_limits_and_processors(warmed: Warmed) -> None:
    import resource

    def narrow() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))

    warm, cold = warmed.both("told", preexec_fn=narrow)
    assert json.loads(warm.out) == json.loads(cold.out)
    assert json.loads(warm.out)["files"] == [123, 456]


def test_it_ignores_what_the_shim_was_told_to_ignore(warmed: Warmed) -> None:
    def deaf() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    warm, cold = warmed.both("told", preexec_fn=deaf)
    assert json.loads(warm.out)["signals"] == json.loads(cold.out)["signals"]


def test_what_proc_shows_of_it_is_its_own(warmed: Warmed) -> None:
    shim = warmed.start("sleep", environ={"EVERSTEP_LAUNCH": "m4rk"})
    ready(shim)
    rank = warmed.pool.behind(shim.pid)
    assert rank is not None
    entries = Path(f"/proc/{rank.pid}/environ").read_bytes().split(b"\0")
    assert b"EVERSTEP_LAUNCH=m4rk" in entries
    rank.send(signal.SIGKILL)
    assert finish(shim).code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("exit", "0"), 0),
        (("exit", "1"), 1),
        (("exit", "3"), 3),
        (("text",), 1),
        (("_exit",), 3),
        (("fail",), 1),
        (("segfault",), -signal.SIGSEGV),
        (("abort",), -signal.SIGABRT),
        (("atexit",), 0),
    ],
)
def test_it_ends_as_a_cold_one_ends(warmed: Warmed, arguments: tuple[str, ...], code: int) -> None:
    warm, cold = warmed.both(*arguments)
    assert warm == cold
    assert warm.code == code


def test_its_standard_input_is_the_shims(warmed: Warmed) -> None:
    warm, cold = warmed.both("stdin", stdin="some\nlines\n")
    assert warm == cold
    assert warm.out == "SOME\nLINES\n"


@pytest.mark.parametrize("what", ["spawn", "load_data"])
def test_it_starts_processes_of_its_own(warmed: Warmed, what: str) -> None:
    warm, cold = warmed.both(what)
    assert warm == cold
    assert warm.code == 0


def test_two_ranks_share_no_random_numbers(warmed: Warmed) -> None:
    ends = [finish(warmed.start("random_numbers", local_rank=rank)) for rank in range(2)]
    first, second = (json.loads(ended.out) for ended in ends)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_signals_to_the_shim_reach_it(warmed: Warmed) -> None:
    shim = warmed.start("say_signals")
    ready(shim)
    assert shim.stdout is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        shim.send_signal(number)
        assert shim.stdout.readline() == f"{int(number)}\n"
    shim.send_signal(signal.SIGTERM)
    ended = finish(shim)
    assert (ended.code, ended.out) == (5, f"{int(signal.SIGTERM)}\n")


def test_it_dies_with_its_shim(warmed: Warmed) -> None:
    shim = warmed.start("sleep")
    ready(shim)
    rank = warmed.pool.behind(shim.pid)
    assert rank is not None
    shim.kill()
    wait_until("the rank's end", lambda: not alive(rank.pid))
    assert rank.wait_end() == -signal.SIGKILL
    shim.communicate()


def test_it_stops_and_goes_on_with_its_shim(warmed: Warmed) -> None:
    shim = warmed.start("sleep")
    ready(shim)
    rank = warmed.pool.behind(shim.pid)
    assert rank is not None
    shim.send_signal(signal.SIGSTOP)
    wait_until("the rank stands", lambda: state(rank.pid) == "T")
    shim.send_signal(signal.SIGCONT)
    wait_until("the rank goes on", lambda: state(rank.pid) == "S")
    shim.terminate()
    assert finish(shim).code == -signal.SIGTERM


def test_another_one_takes_its_place_behind_the_same_shim(warmed: Warmed) -> None:
    warmed.pool.hold(0, on=True)
    shim = warmed.start("sleep")
    ready(shim)
    first = warmed.pool.behind(shim.pid)
    assert first is not None
    first.send(signal.SIGKILL)
    wait_until("its end is told", lambda: (first.pid, -9, True) in warmed.ends)
    assert shim.poll() is None

    pid = warmed.pool.replace(0, {"EVERSTEP_GENERATION": "7"})
    ready(shim)
    second = warmed.pool.behind(shim.pid)
    assert second is not None
    assert (second.pid, second.shim) == (pid, shim.pid)
    assert b"EVERSTEP_GENERATION=7" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    shim.terminate()
    wait_until("the second one's end", lambda: (pid, -15, True) in warmed.ends)
    assert shim.poll() is None
    warmed.pool.hold(0, on=False)
    warmed.pool.release(0)
    assert finish(shim).code == -signal.SIGTERM


def test_one_that_lives_is_ended_before_it_is_replaced(warmed: Warmed) -> None:
    warmed.pool.hold(on=True)
    shim = warmed.start("sleep")
    ready(shim)
    first = warmed.pool.behind(shim.pid)
    assert first is not None
    second = warmed.pool.replace(0, {})
    assert not alive(first.pid)
    wait_until("its end is told", lambda: (first.pid, -9, True) in warmed.ends)
    warmed.pool.hold(on=False)
    shim.kill()
    wait_until("the end of the second", lambda: not alive(second))
    shim.communicate()


def test_who_is_told_of_an_end_may_ask_for_the_next_rank(warmed: Warmed) -> None:
    tell, events = warmed.pool.events.on_end, warmed.pool.events
    warmed.pool.hold(on=True)
    shim = warmed.start("sleep")
    ready(shim)
    first = warmed.pool.behind(shim.pid)
    assert first is not None
    put_down: list[int] = []
    events.on_end = lambda *_: put_down.append(warmed.pool.replace(0, {}))
    first.send(signal.SIGKILL)
    wait_until("the next one", lambda: put_down)
    events.on_end = tell
    assert alive(put_down[0])
    warmed.pool.hold(on=False)
    shim.terminate()
    assert finish(shim).code == -signal.SIGTERM


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
