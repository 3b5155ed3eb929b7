from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import typer
from tests.cli.actors import Api, Ended
from typer.main import get_command

from everstep.cli.main import app
from everstep.cli.verbs import VERBS, load

Everstep = Callable[..., Ended]

HEAVY = ("aiohttp", "rich", "torch", "sqlalchemy", "opentelemetry", "psutil", "everstep.agent")


def leaves() -> list[list[str]]:
    """Return every command that does something, as a person types it."""
    found = []
    for name, verb in VERBS.items():
        command = load(name, verb)
        inner = getattr(command, "commands", {})
        if not inner or command.invoke_without_command:
            found.append([name])
        found += [[name, one] for one in inner]
    return found


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_every_verb_explains_itself_and_its_exit_codes(
    everstep: Everstep, words: list[str]
) -> None:
    told = everstep(*words, "--help")
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith(f"Usage: everstep {' '.join(words)}")
    assert "Exit codes:" in told.out


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_every_verb_gives_an_example_that_could_be_typed(
    everstep: Everstep, words: list[str]
) -> None:
    told = everstep(*words, "--help")
    (examples,) = re.findall(r"Examples?:\n((?:      .*\n)+)", told.out)
    assert any(
        line.strip().startswith(f"everstep {' '.join(words)}") for line in examples.split("\n")
    )


def test_the_list_of_verbs_names_them_all_and_imports_none() -> None:
    code = (
        "import sys\nfrom everstep.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.startswith('everstep.cli.')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    help_text, modules = told.stdout.strip().rsplit("\n", 1)
    for name in VERBS:
        assert f"\n  {name} " in help_text
    assert modules == str([f"everstep.cli.{name}" for name in ("errors", "main", "verbs")])


@pytest.mark.parametrize("words", [["--version"], ["status"], ["nodes", "--json"]], ids=" ".join)
def test_a_verb_that_only_looks_loads_no_daemon(words: list[str]) -> None:
    code = (
        "import sys\nfrom everstep.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_package(everstep: Everstep) -> None:
    assert everstep("--version") == Ended(0, f"everstep {version('everstep')}\n", "")


def test_nothing_at_all_is_answered_with_the_help_and_64(everstep: Everstep) -> None:
    told = everstep()
    assert (told.code, told.out) == (64, "")
    assert told.err.startswith("Usage: everstep")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nodez"], "no such verb: nodez, did you mean nodes?; see `everstep --help`"),
        (["frobnicate"], "no such verb: frobnicate; see `everstep --help`"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["plugins", "--jsn"], "No such option: --jsn"),
        (["plugins", "extra"], "unexpected extra argument"),
        (["config"], "Missing command; see `everstep config --help`"),
        (["config", "chek"], "No such command 'chek'"),
        (["agent", "--with-coordinator", "--coordinator", "x:1"], "leave --coordinator out"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_64(
    everstep: Everstep, words: list[str], says: str
) -> None:
    told = everstep(*words)
    assert (told.code, told.out) == (64, "")
    assert told.err.startswith("everstep: ")
    assert told.err.count("\n") == 1
    assert says in told.err


def test_what_others_wrote_into_an_error_stays_on_its_line(everstep: Everstep, api: Api) -> None:
    api.says["GET /v1/jobs/a"] = 404, {"error": "no job\n\x1b[2Jat all"}
    told = everstep("jobs", "show", "a", "--coordinator", api.url)
    assert told == Ended(64, "", "everstep: no job \\x1b[2Jat all\n")


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("everstep.cli.show.as_json", broken)
    from everstep.cli.main import main

    with pytest.raises(ZeroDivisionError):
        main(["config", "check", "--json"])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m everstep.cli --help | head -c 1"
    told = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert told.stderr == ""
    assert told.stdout == "U"


def test_typer_is_given_a_group_that_it_understands() -> None:
    command = get_command(app)
    assert isinstance(app, typer.Typer)
    assert type(command).__name__ == "Verbs"
