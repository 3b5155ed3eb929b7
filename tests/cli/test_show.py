from __future__ import annotations

import io
import sys

import pytest

from everstep.cli import show

ROWS: list[list[show.Cell]] = [["x" * 300, show.state("healthy")], ["b", show.state("evicted")]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_pipe_nothing_is_cut_and_nothing_is_coloured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show.table(("NAME", "STATE"), ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"NAME{' ' * 298}STATE"
    assert lines[1] == f"{'x' * 300}  healthy"
    assert lines[2] == f"b{' ' * 301}evicted"


def test_on_a_terminal_states_have_colours_and_long_cells_are_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show.table(("NAME", "STATE"), ROWS)
    text = terminal.getvalue()
    assert "\x1b[32mhealthy" in text
    assert "\x1b[31mevicted" in text
    assert text.count("x") == 300


def test_a_terminal_is_spared_the_columns_that_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    show.table(("NAME", "LOSS", "WHY"), [["a", "-", ""], ["b", "-", "late"]])
    show.table(("EMPTY",), [])
    text = terminal.getvalue()
    assert "LOSS" not in text
    assert "WHY" in text
    assert "EMPTY" in text


def test_what_a_job_wrote_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show.table(("WHY",), [["\x1b]0;owned\x07\nsecond [red]line[/red]"]])
    show.say("\x1b[2J")
    show.verbatim("Traceback:\n\x1b[2J  deep\r\n")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b]0;owned\\x07 second [red]line[/red]" in out
    assert "  Traceback:\n" in out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (9.994, "9.99 s"), (119.9, "119.9 s"), (180, "3 min"), (7199, "120 min")],
)
def test_a_duration_has_the_unit_that_a_person_would_use(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text
