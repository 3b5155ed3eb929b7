"""A decision is written down as it is."""

from __future__ import annotations

import logging

import pytest

from everstep.plugins.actions.log import LogAction


def test_every_field_of_a_decision_that_has_a_value_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decision = {"incident": 7, "what": "evict", "evicted": ["n3"], "exit_code": None, "x": []}
    with caplog.at_level(logging.DEBUG):
        LogAction(LogAction.Config()).act(decision)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "decided")
    fields = vars(record)
    assert (fields["incident"], fields["what"], fields["evicted"]) == (7, "evict", ["n3"])
    assert fields.keys().isdisjoint({"exit_code", "x"})


def test_a_field_whose_name_logging_keeps_for_itself_is_written_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LogAction(LogAction.Config()).act({"name": "n3", "args": (1,), "message": "m", "asctime": 0})
    fields = vars(caplog.records[0])
    assert (fields["decision_name"], fields["decision_args"]) == ("n3", (1,))
    assert (fields["decision_message"], fields["decision_asctime"]) == ("m", 0)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_it_is_as_loud_as_it_was_told(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        LogAction(LogAction.Config(level=level)).act({})  # type: ignore[arg-type]  # parametrized
    assert [r.levelname for r in caplog.records] == [level.upper()]
