"""The entry point that torch finds: imported by everything that imports elastic rendezvous.

So it holds nothing but the standard library, and the real work is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def rendezvous() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the handler for `--rdzv-backend=everstep`."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from everstep.launch.handler import create

    return create(params)
