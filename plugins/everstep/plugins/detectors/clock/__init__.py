"""Says when this node's clock cannot be trusted to put events in order."""

from everstep.plugins.detectors.clock.detect import ClockDetector

__all__ = ["ClockDetector"]
