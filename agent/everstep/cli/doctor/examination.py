"""The checks in their order."""

from __future__ import annotations

from everstep.cli.doctor import kernel, machine, reach
from everstep.cli.doctor.checks import Check

CHECKS = [
    Check("configuration", "all parts", machine.configuration),
    Check("agent", "jobs on this machine", reach.agent),
    Check("coordinator", "deciding who trains; `everstep status`", reach.coordinator),
    Check("runtime folder", "the agent's socket", machine.runtime_folder),
    Check("memfd sealing", "the progress pages of ranks", kernel.memfd_sealing),
    Check("pidfd", "seeing a death at once", kernel.pidfd),
    Check("peer pidfd", "knowing a client without a race", kernel.peer_pidfd),
    Check("kernel log", "plugins that read it (none of the built-in ones yet)", kernel.kernel_log),
    Check("ptrace", "looking into ranks that hang, by hand so far", kernel.ptrace_scope),
    Check("NVML", "GPU health", machine.nvml),
    Check("torch", "training on this machine", machine.torch),
    Check("clock", "the order of events of several nodes", machine.clock),
    Check("open files", "clients of the agent, agents of the coordinator", machine.open_files),
    Check("state folder", "the coordinator's journal", machine.state_folder),
]
