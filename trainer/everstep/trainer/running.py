"""A training program that outlives its peers: the same process trains on in the next generation.

    def main(session: Session) -> None:
        model = session.wrap(Net())
        ...

    run(SessionConfig(run_dir="runs/mine"), main)

When a peer is lost, what `main` had is dropped, and `main` is called again with a session of the
next generation. It builds model and optimizer anew, and `snapshot_state` brings the state back.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from everstep.trainer.group import leave_as_usual
from everstep.trainer.orders import Orders
from everstep.trainer.release import Connections, disown_meshes, lost_a_peer
from everstep.trainer.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.launch.control import Reform
    from everstep.sdk import ConfigFile
    from everstep.trainer.config import SessionConfig

log = logging.getLogger(__name__)

ORDER_S = 15.0
"""How long a rank that lost a peer waits for its launcher's order before it ends by its error."""
_TEARDOWN_S = 2.0


def run(
    config: SessionConfig,
    main: Callable[[Session], None],
    file: ConfigFile | None = None,
    *,
    hooks: Mapping[str, Any] | None = None,
) -> None:
    """Call `main` with a session, again in each generation that this process is formed into.

    Raises what `main` raises, unless it came of a lost peer and the launcher orders this process
    into the next generation in time.
    """
    connections = Connections()
    orders = Orders(os.environ, connections.shut_down)
    with connections.watching():
        while True:
            try:
                _once(config, main, file, hooks, orders)
            except Exception as exc:
                order = _order_after(exc, orders, connections)
                if order is None:
                    raise
                _let_go(exc)
            else:
                return
            _leave_groups(connections)
            _join(order, orders)


def _once(
    config: SessionConfig,
    main: Callable[[Session], None],
    file: ConfigFile | None,
    hooks: Mapping[str, Any] | None,
    orders: Orders,
) -> None:
    with Session(config, file, hooks=hooks, orders=orders) as session:
        seat = session.seat
        orders.ready(seat.generation or 0, seat.local_rank)
        main(session)


def _order_after(exc: Exception, orders: Orders, connections: Connections) -> Reform | None:
    """Return the order that explains the error, or that follows a peer's loss in time."""
    if not orders.possible:
        return None
    patience_s = ORDER_S if lost_a_peer(exc, connections) else 0.0
    return orders.wait(patience_s)


def _let_go(exc: BaseException) -> None:
    """Drop what the error's frames hold: the old model must be gone before the new one is made."""
    log.info("left the generation before: %s", exc)
    seen: BaseException | None = exc
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__


def _leave_groups(connections: Connections) -> None:
    """Take the groups down. Ends this process when that hangs: a fresh one takes its place."""
    connections.shut_down()
    gc.collect()
    disown_meshes()
    if not dist.is_initialized():
        return
    closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
    closing.start()
    closing.join(_TEARDOWN_S)
    if closing.is_alive():
        log.error("the process group does not come down; this process ends instead")
        os._exit(1)
    connections.forget()


def _join(order: Reform, orders: Orders) -> None:
    os.environ.update(order.environment)
    orders.take(order)
    orders.released(order.generation)
    leave_as_usual()
