"""Names that cross process boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.ids import SnapshotId, agent_socket


@given(step=st.integers(0, 10**12), generation=st.integers(0, 10**6))
def test_a_snapshot_id_comes_back_as_it_went(step: int, generation: int) -> None:
    assert SnapshotId.parse(str(SnapshotId(step, generation))) == (step, generation)


def test_snapshot_ids_sort_by_step_and_then_by_generation() -> None:
    unordered = [SnapshotId(20, 1), SnapshotId(10, 3), SnapshotId(10, 2), SnapshotId(1_000_000, 1)]
    assert [str(i) for i in sorted(unordered)] == [
        "s000010-g2",
        "s000010-g3",
        "s000020-g1",
        "s1000000-g1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s12-g1",
        "s000012",
        "s000012-g",
        "g1-s000012",
        "s000012-g1.tmp",
        " s000012-g1",
        "s000012-g1\n",
        "s-00012-g1",
        "s000012-g-1",
        "s0000012-g1",
        "s000012-g01",
        "s00001\N{ARABIC-INDIC DIGIT TWO}-g1",
    ],
)
def test_what_is_no_snapshot_id_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match="is not a snapshot id such as s000120-g7"):
        SnapshotId.parse(text)


def test_the_environment_names_the_socket_before_anything_else() -> None:
    environ = {"EVERSTEP_SOCKET": "/tmp/a.sock", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert agent_socket(environ) == Path("/tmp/a.sock")


def test_a_users_own_agent_is_expected_where_there_is_none_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _self: False)
    user = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert agent_socket(user) == Path("/run/user/7/everstep/agent.sock")
    assert agent_socket({}) == Path("/run/everstep/agent.sock")


def test_the_agent_for_all_is_preferred_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _self: True)
    user = {"XDG_RUNTIME_DIR": "/run/user/7", "EVERSTEP_SOCKET": ""}
    assert agent_socket(user) == Path("/run/everstep/agent.sock")
