"""Decides when the run's state is saved: every so many steps, and at the end."""

from everstep.plugins.hooks.snapshot.schedule import Snapshot, SnapshotConfig

__all__ = ["Snapshot", "SnapshotConfig"]
