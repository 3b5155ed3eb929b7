"""How a launcher ends, and what a scheduler should make of it."""

from __future__ import annotations

DONE = 0
UNAVAILABLE = 69
"""Not enough nodes in time, or no agent: the reason is on stderr; worth another try later."""
EVICTED = 75
"""This node was evicted and `on_evict = "exit"`."""
STOPPED = 76
"""An operator stopped the job."""
NO_REQUEUE = 93
"""The job fails the same way again and again: do not requeue it, a person is needed."""
USAGE = 64
"""The command line or the configuration is wrong."""
