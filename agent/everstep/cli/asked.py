"""What a person asked of the coordinator: where it is, and whether to print JSON."""

from __future__ import annotations

import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from everstep.cli.api import Api


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a verb that asks the coordinator."""

    coordinator: str | None = None
    token: str | None = None
    config: Path | None = None
    json: bool = False

    def api(self) -> Api:
        """Return the coordinator. Raises ConfigError and ApiRefusedError."""
        from everstep.cli.api import Api

        return Api.from_environ(self.coordinator, self.token, config=self.config)

    def within(self, context: typer.Context) -> Asked:
        """Return these options, and for those left out what was said before the inner verb."""
        outer: Any = context.obj or Asked()
        return Asked(
            self.coordinator or outer.coordinator,
            self.token or outer.token,
            self.config or outer.config,
            self.json or outer.json,
        )


def me() -> str:
    """Return who asks, for the journal: user and machine."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
