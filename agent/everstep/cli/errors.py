"""What a verb raises on purpose: one line for the person, one exit code for the script."""

from __future__ import annotations

from everstep.sdk.errors import EverstepError
from everstep.wire.exit_codes import UNAVAILABLE, USAGE


class VerbError(EverstepError):
    """A verb cannot do what was asked; it ends with `exit_code`."""

    exit_code = UNAVAILABLE


class WrongRequestError(VerbError):
    """What was asked for makes no sense here, and asking again will not help."""

    exit_code = USAGE
