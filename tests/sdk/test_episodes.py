"""A condition is told when it begins, when it gets worse and when it is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.sdk import Episodes, Finding, Severity


def finding(severity: Severity = "error", *, at_s: float = 0.0, action: str = "monitor") -> Finding:
    return Finding(
        name="hot",
        component="host",
        severity=severity,
        summary="95 C",
        at_s=at_s,
        suggested_action=action,
    )


def test_it_is_told_once_however_long_it_lasts() -> None:
    episodes = Episodes()
    told = [episodes.update({"hot": finding(at_s=t)}, t) for t in (1.0, 2.0, 3.0)]
    assert told == [[finding(at_s=1.0)], [], []]


def test_its_end_is_told_with_the_time_of_the_end() -> None:
    episodes = Episodes()
    episodes.update({"hot": finding(at_s=1.0)}, 1.0)
    (over,) = episodes.update({}, 9.0)
    assert (over.resolved, over.at_s, over.name) == (True, 9.0, "hot")
    assert episodes.update({}, 10.0) == []


def test_a_change_of_severity_or_of_what_to_do_is_news() -> None:
    episodes = Episodes()
    episodes.update({"hot": finding("warning")}, 1.0)
    assert episodes.update({"hot": finding("fatal")}, 2.0) == [finding("fatal")]
    worse = finding("fatal", action="evict_node")
    assert episodes.update({"hot": worse}, 3.0) == [worse]


def test_two_of_one_name_are_kept_apart_by_their_keys() -> None:
    episodes = Episodes()
    assert len(episodes.update({("job-a", 0): finding(), ("job-b", 0): finding()}, 1.0)) == 2
    assert len(episodes.update({("job-b", 0): finding()}, 2.0)) == 1


@given(looks=st.lists(st.sets(st.integers(0, 3)), max_size=20))
def test_every_beginning_has_one_end(looks: list[set[int]]) -> None:
    episodes = Episodes()
    open_now: set[str] = set()
    for at_s, keys in enumerate([*looks, set()], start=1):
        wrong = {
            k: Finding(name=str(k), component="host", severity="info", summary="", at_s=float(at_s))
            for k in keys
        }
        for told in episodes.update(wrong, float(at_s)):
            assert (told.name in open_now) == told.resolved
            open_now ^= {told.name}
        assert open_now == {str(k) for k in keys}
    assert not open_now
