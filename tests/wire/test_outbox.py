"""What was not acknowledged is still there, in order, and memory stays bounded."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.wire.outbox import Outbox

LIMIT = 5


class AgainstAPlainList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.box: Outbox[str] = Outbox(limit=LIMIT)
        self.put = 0
        self.kept: list[tuple[int, str]] = []
        self.dropped = 0

    @rule(text=st.text(max_size=3))
    def put_one(self, text: str) -> None:
        self.put += 1
        assert self.box.put(text) == self.put
        self.kept.append((self.put, text))
        if len(self.kept) > LIMIT:
            self.kept.pop(0)
            self.dropped += 1

    @rule(seq=st.integers(0, 30))
    def acknowledge(self, seq: int) -> None:
        self.box.ack(seq)
        self.kept = [(n, text) for n, text in self.kept if n > seq]

    @invariant()
    def nothing_is_lost_but_the_oldest_over_the_limit(self) -> None:
        assert self.box.pending() == self.kept
        assert len(self.box) == len(self.kept)
        assert self.box.dropped == self.dropped


TestAgainstAPlainList = AgainstAPlainList.TestCase


def test_an_old_acknowledgement_that_comes_late_forgets_nothing_newer() -> None:
    box: Outbox[str] = Outbox()
    for text in "abc":
        box.put(text)
    box.ack(2)
    box.ack(1)
    assert box.pending() == [(3, "c")]


def test_what_was_handed_out_is_a_copy() -> None:
    box: Outbox[str] = Outbox()
    box.put("a")
    box.pending().clear()
    assert box.pending() == [(1, "a")]
