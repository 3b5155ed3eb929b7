"""Writes every decision into the coordinator's log, and does nothing else."""

from everstep.plugins.actions.log.act import LogAction

__all__ = ["LogAction"]
