"""What every local rank is doing: its step, loss and pace, and whether it has come to a stand."""

from everstep.plugins.collectors.progress.collect import ProgressCollector

__all__ = ["ProgressCollector"]
