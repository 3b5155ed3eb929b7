"""The verbs by name. A verb's module is imported when it is used, so that none slows the others."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

_PASSED_ON = {
    # What follows the first word is not looked at: --help may be the script's.
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    "options_metavar": "TORCHRUN-OPTIONS... SCRIPT [ARGUMENTS]...",
}


class Verb(NamedTuple):
    """Where a verb is: a function in the form that typer takes, or a typer application.

    `settings` are for typer's `command`.
    """

    module: str
    name: str
    summary: str
    settings: Mapping[str, Any] = MappingProxyType({})


SECTIONS: dict[str, dict[str, Verb]] = {
    "Run": {
        "agent": Verb("everstep.cli.agent", "agent", "The daemon of one node."),
        "coordinator": Verb(
            "everstep.cli.coordinator", "coordinator", "The daemon that decides who trains."
        ),
        "torchrun": Verb(
            "everstep.cli.torchrun",
            "torchrun",
            "Stock torchrun with everstep's flags filled in.",
            _PASSED_ON,
        ),
        "demo": Verb(
            "everstep.cli.demo.main", "demo", "Break a small run on this machine; watch it go on."
        ),
    },
    "Look": {
        "status": Verb("everstep.cli.status", "status", "Coordinator, nodes, jobs: one screen."),
        "nodes": Verb("everstep.cli.nodes", "nodes", "All nodes, or `nodes show NAME`."),
        "jobs": Verb("everstep.cli.jobs", "jobs", "All jobs, `jobs show ID`, `jobs stop ID`."),
        "incidents": Verb(
            "everstep.cli.incidents", "incidents", "What went wrong, or `incidents show ID`."
        ),
        "snapshots": Verb(
            "everstep.cli.snapshots", "snapshots", "A run's: `list`, `verify`, `prune`, `export`."
        ),
        "plugins": Verb("everstep.cli.plugins", "plugins", "All plugins and how they are doing."),
    },
    "Act": {
        "cordon": Verb("everstep.cli.operate", "cordon", "Let a node take no new part."),
        "uncordon": Verb("everstep.cli.operate", "uncordon", "Let it take part again."),
        "evict": Verb("everstep.cli.operate", "evict", "Put a node out of its job now."),
        "readmit": Verb("everstep.cli.operate", "readmit", "Test an evicted node and take it in."),
    },
    "Check": {
        "doctor": Verb(
            "everstep.cli.doctor.verb", "doctor", "What this machine and your rights allow."
        ),
        "config": Verb("everstep.cli.config", "config", "`config check`: is the file right?"),
    },
}
VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


class Verbs(TyperGroup):
    """A group of commands that come into being when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  typer's signature
        """Return all names."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb and return its command."""
        if cmd_name in VERBS:
            return load(cmd_name, VERBS[cmd_name])
        close = difflib.get_close_matches(cmd_name, VERBS, n=1)
        return ctx.fail(f"no such verb: {cmd_name}{f', did you mean {close[0]}?' if close else ''}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  typer's signature
        """Write the verbs by section, without importing any."""
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.summary) for name, verb in verbs.items()])


def application(**settings: Any) -> typer.Typer:
    """Return an empty application; help and errors are plain text, the same in a pipe."""
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings
    )


def load(name: str, verb: Verb) -> Any:
    """Return the command of a verb. Raises ImportError and AttributeError when it is not there."""
    found = getattr(import_module(verb.module), verb.name)
    if not isinstance(found, typer.Typer):
        app = application()
        app.command(name, **verb.settings)(found)
        found = app
    command: Any = get_command(found)
    command.name = name
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = keep_blocks(one.help or "")
    return command


def keep_blocks(text: str) -> str:
    r"""Mark the paragraphs with indented lines, so that examples keep their lines.

    >>> keep_blocks("Prose\nto fill.\n\nExamples:\n    everstep status")
    'Prose\nto fill.\n\n\x08\nExamples:\n    everstep status'
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"\b\n{one}" if "\n  " in one else one for one in paragraphs)
