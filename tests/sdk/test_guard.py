"""The guard round a plugin: whatever it does becomes an outcome."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from everstep.sdk import sound
from everstep.sdk.guard import Done, Failed, Guard, NonsenseError
from everstep.wire.messages import Finding, Reading


async def test_a_value_comes_back_with_the_time_it_took() -> None:
    guard = Guard("p")
    outcome = await guard.call(lambda: threading.current_thread().name)
    guard.close()
    assert isinstance(outcome, Done)
    assert outcome.value == "p"
    assert 0 <= outcome.took_s < 10


async def test_all_calls_are_made_in_one_thread() -> None:
    guard = Guard("p")
    outcomes = [await guard.call(threading.get_ident) for _ in range(5)]
    guard.close()
    assert len({o.value for o in outcomes if isinstance(o, Done)}) == 1


async def test_what_is_raised_becomes_an_outcome_with_its_place() -> None:
    guard = Guard("p")
    outcome = await guard.call(lambda: 1 // 0)
    guard.close()
    assert isinstance(outcome, Failed)
    assert outcome.fault == "raised"
    assert outcome.why.startswith("ZeroDivisionError")
    assert "test_guard.py:" in outcome.why
    assert guard.tally.failures["raised"] == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_even_what_ends_a_program_ends_only_the_call(error: BaseException) -> None:
    guard = Guard("p")

    def leave() -> None:
        raise error

    assert isinstance(await guard.call(leave), Failed)
    assert isinstance(await guard.call(lambda: 1), Done)
    guard.close()


async def test_nonsense_is_told_apart() -> None:
    guard = Guard("p")

    def talk() -> None:
        raise NonsenseError("returned None")

    outcome = await guard.call(talk)
    guard.close()
    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.why) == ("nonsense", "returned None")


async def test_a_call_that_hangs_is_left_alone_and_never_doubled() -> None:
    guard = Guard("p", timeout_s=0.1)
    gate = threading.Event()
    calls = []

    def hang() -> None:
        calls.append(1)
        gate.wait(30)

    first = await guard.call(hang)
    assert isinstance(first, Failed)
    assert first.fault == "hung"
    assert guard.busy
    second = await guard.call(hang)
    assert isinstance(second, Failed)
    assert "has not come back" in second.why
    assert calls == [1]

    gate.set()
    async with asyncio.timeout(20):
        await guard.idle()
    third = await guard.call(lambda: "fine")
    guard.close()
    assert isinstance(third, Done)
    assert guard.tally.in_a_row == 0
    assert guard.tally.failures["hung"] == 2


async def test_a_late_answer_is_never_taken_for_that_of_the_next_call() -> None:
    guard = Guard("p", timeout_s=0.1)

    def be_late() -> str:
        time.sleep(0.5)
        return "old"

    assert isinstance(await guard.call(be_late), Failed)
    async with asyncio.timeout(20):
        await guard.idle()
    outcome = await guard.call(lambda: "new")
    guard.close()
    assert isinstance(outcome, Done)
    assert outcome.value == "new"


async def test_a_plugin_is_not_blamed_for_a_pause_of_the_whole_process() -> None:
    jumps = iter([0.0, 0.0, 0.0])
    now = [0.0]

    def clock() -> float:
        now[0] += next(jumps, 0.0)
        return now[0]

    guard = Guard("p", timeout_s=0.2, clock=clock)

    def work() -> str:
        now[0] += 60.0  # SIGSTOP for a minute in the middle of the call
        time.sleep(0.3)
        return "done"

    outcome = await guard.call(work)
    guard.close()
    assert isinstance(outcome, Done)


def reading(**changes: object) -> Reading:
    return Reading(**({"name": "a.b", "value": 1.0} | changes))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "bad",
    [
        reading(name=None),
        reading(name="Upper"),
        reading(name="a" * 200),
        reading(value="1"),
        reading(value=True),
        reading(value=10**400),
        reading(value=float("nan"), counter=True),
        reading(value=-1, counter=True),
        reading(unit=3),
        reading(unit="\N{DEGREE SIGN}C"),
        reading(attributes=None),
        reading(attributes={"a": 1}),
        reading(attributes={1: "a"}),
        reading(attributes={"a": "\udcff"}),
        reading(attributes={"a": "x" * 300}),
        reading(attributes={str(n): "" for n in range(30)}),
        object(),
        None,
        Finding(name="\udcff", component="host", severity="info", summary="", at_s=1.0),
        Finding(name="n", component="host", severity="info", summary="", at_s=float("inf")),
        Finding(name="n", component="host", severity="info", summary="x" * 100_000, at_s=1.0),
        Finding(name="n", component="host", severity="info", summary=7, at_s=1.0),  # type: ignore[arg-type]  # on purpose
    ],
)
def test_an_observation_that_is_none_is_named(bad: object) -> None:
    with pytest.raises(NonsenseError):
        sound.observations([reading(), bad])


@pytest.mark.parametrize("bad", [None, 7, "text", b"bytes", {"a": 1}, reading()])
def test_what_is_no_list_is_named(bad: object) -> None:
    with pytest.raises(NonsenseError):
        sound.observations(bad)


def test_good_observations_pass_unchanged() -> None:
    finding = Finding(name="n", component="gpu:1", severity="fatal", summary="s", at_s=1.0)
    good = [reading(), reading(value=None), reading(value=float("nan")), finding]
    assert sound.observations(iter(good)) == good
    assert sound.findings(iter([finding])) == [finding]
    with pytest.raises(NonsenseError):
        sound.findings([reading()])
