"""Says how far this rank has come: a record a step on its progress page, a line now and then."""

from everstep.plugins.hooks.progress.report import Progress, ProgressConfig

__all__ = ["Progress", "ProgressConfig"]
