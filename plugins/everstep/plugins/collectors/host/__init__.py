"""The host itself: processors, memory, disks, network and how well its clock can be trusted."""

from everstep.plugins.collectors.host.collect import HostCollector

__all__ = ["HostCollector"]
