"""adjtimex(2): what the kernel says about its own clock. Asking needs no right."""

from __future__ import annotations

import ctypes
from functools import cache

from everstep.plugins.collectors.host.parse import KernelClock

_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
_TIME_ERROR = 5


class _Timex(ctypes.Structure):
    # struct timex of a 64-bit Linux; what lies behind `status` is not read.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def read_kernel_clock() -> KernelClock | None:
    """Return the kernel's view of the wall clock, None where it may not be asked."""
    timex = _Timex()
    try:
        state = _libc().adjtimex(ctypes.byref(timex))
    except (AttributeError, OSError):
        return None
    if state < 0:
        return None
    unit_s = 1e-9 if timex.status & _STA_NANO else 1e-6
    return KernelClock(
        synchronized=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        offset_s=timex.offset * unit_s,
        max_error_s=timex.maxerror * 1e-6,
    )
