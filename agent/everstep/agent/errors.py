"""What keeps an agent from starting."""

from __future__ import annotations

from everstep.sdk.errors import EverstepError


class AgentError(EverstepError):
    """The agent cannot start here: what is in the way and what to do about it."""
