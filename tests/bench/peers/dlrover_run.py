"""`dlrover-run` of DLRover 0.6.1, with the one argument that torch 2.13 wants of its launcher.

torch's SubprocessHandler has a parameter `numa_options` without a default; DLRover, written for
older ones, does not pass it. Otherwise its own main runs unchanged. Lives in DLRover's venv.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.multiprocessing import api, subprocess_handler

_POSITION = 6


class Handler(subprocess_handler.SubprocessHandler):
    """The same, without NUMA binding where none is asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if len(args) <= _POSITION:
            options.setdefault("numa_options", None)
        super().__init__(*args, **options)


if __name__ == "__main__":
    # Before DLRover takes the name over into modules of its own.
    vars(api)["SubprocessHandler"] = Handler
    vars(subprocess_handler)["SubprocessHandler"] = Handler
    from dlrover.trainer.torch.main import main

    sys.argv[0] = "dlrover-run"
    sys.exit(main())
