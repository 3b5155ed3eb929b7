"""`everstep`: one small file per verb; what a verb raises on purpose becomes one line on stderr."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from everstep.cli.agent import agent
from everstep.sdk.config import ConfigError
from everstep.sdk.errors import EverstepError
from everstep.wire.exit_codes import UNAVAILABLE, USAGE

app = typer.Typer(
    help="Keeps a torchrun job stepping while the machines under it fail.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(agent)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"everstep {version('everstep')}")
        raise typer.Exit


@app.callback()
def everstep(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and leave.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Keep a torchrun job stepping while the machines under it fail."""


def main() -> None:
    """Run a verb and leave with its exit code."""
    try:
        app()
    except ConfigError as exc:
        _leave(exc, USAGE)
    except EverstepError as exc:
        _leave(exc, UNAVAILABLE)


def _leave(exc: EverstepError, code: int) -> None:
    sys.stderr.write(f"everstep: {exc}\n")
    sys.exit(code)
