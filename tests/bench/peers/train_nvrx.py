"""everstep's training script with a heartbeat to NVRx's rank monitor after every step.

Nothing else differs from `python -m everstep.trainer`. Lives in NVRx's venv.
"""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

from everstep.trainer.__main__ import main
from everstep.trainer.session import Session


def with_heartbeats() -> None:
    """Make each step of a session end with a heartbeat."""
    client = RankMonitorClient()
    step = Session.step

    def beating(self: Session, *args: Any, **options: Any) -> bool:
        applied = step(self, *args, **options)
        if not client.is_initialized:
            client.init_workload_monitoring()
        client.send_heartbeat()
        return applied

    Session.step = beating  # type: ignore[method-assign]  # the session's loop is not ours to edit


if __name__ == "__main__":
    with_heartbeats()
    main()
