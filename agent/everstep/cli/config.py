"""`everstep config check`: what is wrong with the configuration file."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli import show
from everstep.cli.options import Json
from everstep.cli.verbs import application
from everstep.wire.exit_codes import USAGE

config = application()


@config.callback()
def _config() -> None:
    """Look at the configuration file."""


@config.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Configuration file (TOML). Default: /etc/everstep/everstep.toml if it exists.",
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Check every table of a configuration file.

    All that is wrong is said, not only the first of it. Looked at are [agent], [coordinator],
    [trainer] and the tables of all installed plugins, as the parts that read them would. A plugin
    whose module cannot be imported here (hooks may need torch) is named and not checked. With
    --json: file, ok, errors (table, key, message), notes.

    Examples:
        everstep config check
        everstep config check run.toml --json

    Exit codes:
        0   everything that could be checked is right
        64  something is wrong, or there is no such file
    """
    from everstep.cli import tables
    from everstep.sdk.config import ConfigError, ConfigFile

    try:
        checked = tables.check(ConfigFile.load(file), os.environ)
    except ConfigError as exc:  # no file, or no TOML
        mistake = tables.Mistake(None, None, str(exc))
        checked = tables.Checked(str(file) if file else None, [mistake])
    if json:
        show.as_json({**asdict(checked), "ok": not checked.errors})
    else:
        _print(checked.file, [one.message for one in checked.errors], checked.notes)
    if checked.errors:
        raise typer.Exit(USAGE)


def _print(file: str | None, errors: list[str], notes: list[str]) -> None:
    for error in errors:
        show.say(error, style="red")
    for note in notes:
        show.say(note, style="yellow")
    if not errors:
        show.say(f"{file}: ok" if file else "no configuration file: the built-in defaults are ok")
