"""Who trains next: pure rules, and what must hold whatever the nodes do."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from everstep.coordinator.membership import Away, Form, Gone, Out, Ready, Standing, Wait, choose
from everstep.wire.messages import Member

NOW_S = 100.0


def ready(name: str) -> Ready:
    return Ready(Member(node=name, address=f"addr-{name}", local_world_size=1))


def names(form: object) -> list[str]:
    assert isinstance(form, Form), form
    return [m.node for m in form.members]


def pick(
    previous: str, nodes: Mapping[str, Standing], *, at_least: int = 1, at_most: int = 3
) -> Form | Wait:
    return choose(list(previous), nodes, at_least=at_least, at_most=at_most, now_s=NOW_S)


def test_the_first_to_join_train_and_the_rest_is_parked() -> None:
    form = pick("", {n: ready(n) for n in "cabd"})
    assert names(form) == ["c", "a", "b"]
    assert isinstance(form, Form)
    assert form.spares == ("d",)


def test_a_spare_takes_the_place_of_the_lost_one_and_ranks_stay_put() -> None:
    nodes: dict[str, Standing] = {
        "a": ready("a"),
        "b": Out("evicted"),
        "c": ready("c"),
        "d": ready("d"),
    }
    form = pick("abc", nodes)
    assert names(form) == ["a", "d", "c"]


def test_a_launcher_that_ended_is_replaced_at_once_when_there_is_a_spare() -> None:
    nodes: dict[str, Standing] = {
        "a": ready("a"),
        "b": Gone(NOW_S + 10, "ended"),
        "c": ready("c"),
        "d": ready("d"),
    }
    assert names(pick("abc", nodes)) == ["a", "d", "c"]


def test_without_a_spare_a_launcher_that_ended_is_waited_for_and_then_left_out() -> None:
    nodes: dict[str, Standing] = {"a": ready("a"), "b": Gone(NOW_S + 10, "b ended")}
    assert pick("ab", nodes) == Wait(NOW_S + 10, "b ended")
    nodes["b"] = Gone(NOW_S, "b ended")
    assert names(pick("ab", nodes)) == ["a"]


def test_an_agent_that_is_away_is_waited_for_even_when_there_is_a_spare() -> None:
    nodes: dict[str, Standing] = {"a": ready("a"), "b": Away(NOW_S + 1, "away"), "d": ready("d")}
    assert pick("ab", nodes) == Wait(NOW_S + 1, "away")
    nodes["b"] = Away(NOW_S, "away")
    assert names(pick("ab", nodes)) == ["a", "d"]


def test_a_spare_that_is_away_holds_nobody_up() -> None:
    nodes: dict[str, Standing] = {"a": ready("a"), "d": Away(NOW_S + 9, "away")}
    assert names(pick("a", nodes)) == ["a"]


def test_fewer_than_the_minimum_wait_for_another_node() -> None:
    choice = pick("ab", {"a": ready("a"), "b": Out("evicted")}, at_least=2)
    assert choice == Wait(None, "1 of at least 2 nodes are here")


def test_a_job_takes_spares_in_up_to_its_maximum_when_it_is_formed_anew_anyway() -> None:
    assert names(pick("a", {n: ready(n) for n in "abcd"})) == ["a", "b", "c"]


STANDINGS = st.sampled_from(["ready", "away", "overdue", "gone", "forgotten", "out"])


def standing(name: str, kind: str) -> Standing:
    match kind:
        case "ready":
            return ready(name)
        case "away":
            return Away(NOW_S + 5, "away")
        case "overdue":
            return Away(NOW_S - 5, "away")
        case "gone":
            return Gone(NOW_S + 5, "gone")
        case "forgotten":
            return Gone(NOW_S - 5, "gone")
        case _:
            return Out("out")


@given(
    kinds=st.lists(STANDINGS, min_size=1, max_size=8),
    before=st.lists(st.integers(0, 9), unique=True, max_size=6),
    at_least=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_whatever_the_nodes_do_a_plan_is_sound(
    kinds: list[str], before: list[int], at_least: int, more: int
) -> None:
    nodes = {f"n{i}": standing(f"n{i}", kind) for i, kind in enumerate(kinds)}
    previous = [f"n{i}" for i in before][: at_least + more]
    choice = choose(previous, nodes, at_least=at_least, at_most=at_least + more, now_s=NOW_S)
    if isinstance(choice, Wait):
        return
    members = [m.node for m in choice.members]
    assert at_least <= len(members) <= at_least + more
    assert len(set(members)) == len(members)
    assert all(isinstance(nodes[m], Ready) for m in members), "only who is there"
    assert not set(members) & set(choice.spares)
    kept = [m for m in members if m in previous]
    assert kept == [p for p in previous if p in members], "order is kept"
    full = len(members) == len(previous)
    assert not full or all(members[i] == p for i, p in enumerate(previous) if p in members), (
        "ranks stay put"
    )
    assert set(members) | set(choice.spares) == {
        n for n, s in nodes.items() if isinstance(s, Ready)
    }, "whoever is ready trains or is parked"
