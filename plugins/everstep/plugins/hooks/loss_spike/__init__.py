"""Sees a loss that jumps, and can keep the batch that did it away from the weights."""

from everstep.plugins.hooks.loss_spike.detector import Detector, Event, LossSpikeConfig
from everstep.plugins.hooks.loss_spike.watch import LossSpike

__all__ = ["Detector", "Event", "LossSpike", "LossSpikeConfig"]
