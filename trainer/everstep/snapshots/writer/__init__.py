"""The process that puts snapshots on disk: one per launcher, no torch in it.

It holds the ranks' memory too, so it finishes what a rank has ordered when the rank is gone.
"""

from everstep.snapshots.writer.child import Writer, start

__all__ = ["Writer", "start"]
