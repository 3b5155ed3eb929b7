"""NVIDIA GPUs through the driver's own library: heat, power, use, memory, and what is lost."""

from everstep.plugins.collectors.nvml.collect import NvmlCollector

__all__ = ["NvmlCollector"]
