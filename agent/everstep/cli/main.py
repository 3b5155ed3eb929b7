"""`everstep`: one small file per verb; what a verb raises on purpose becomes one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from everstep.cli.errors import VerbError
from everstep.cli.verbs import Verbs, application
from everstep.sdk.config import ConfigError
from everstep.sdk.errors import EverstepError
from everstep.wire.exit_codes import UNAVAILABLE, USAGE

# typer brings a click of its own in its newer versions; the ancestor is the same in all of them.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = application(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"everstep {version('everstep')}")
        raise typer.Exit


@app.callback()
def everstep(
    context: typer.Context,
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and leave.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Keep a torchrun job stepping while the machines under it fail.

    `everstep VERB --help` explains a verb, its exit codes included. Those of the verbs that only
    look: 0 answered; 64 wrong arguments or configuration; 69 nobody answers.
    """
    del show_version  # its callback has seen to it
    if context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and leave with its exit code."""
    try:
        code = app(arguments, prog_name="everstep", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except _UsageError as exc:
        _leave(_usage(exc), USAGE)
    except ConfigError as exc:
        _leave(str(exc), USAGE)
    except VerbError as exc:
        _leave(str(exc), exc.exit_code)
    except EverstepError as exc:
        _leave(str(exc), UNAVAILABLE)
    except BrokenPipeError:
        # Who read us has gone; Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _usage(exc: Any) -> str:
    path = exc.ctx.command_path if exc.ctx else "everstep"
    return f"{exc.format_message().rstrip('.')}; see `{path} --help`"


def _leave(why: str, code: int) -> None:
    from everstep.cli.show import printable

    sys.stderr.write(f"everstep: {printable(why)}\n")
    sys.exit(code)
