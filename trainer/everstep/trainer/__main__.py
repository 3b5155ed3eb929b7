"""`torchrun ... -m everstep.trainer --config run.toml`: one rank of our own training loop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path

from everstep.sdk import ConfigError
from everstep.trainer.config import load
from everstep.wire import exit_codes


def main() -> None:
    """Train; exit 0 when done, 64 for a wrong configuration, 1 with a traceback for the rest."""
    parser = argparse.ArgumentParser(prog="python -m everstep.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file with [trainer]")
    options = parser.parse_args()
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    )
    try:
        config, file = load(options.config)
        from torch.distributed.elastic.multiprocessing.errors import record

        from everstep.trainer.train import train

        record(train)(config, file)
    except ConfigError as exc:
        _say_once(f"everstep: {exc}")
        _leave(exit_codes.USAGE)
    except Exception:  # noqa: BLE001  the last stop: told in full, then out before anything hangs
        traceback.print_exc()
        _leave(1)


def _say_once(line: str) -> None:
    # Every rank of the node has the same file: one line is enough.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(line + "\n")


def _leave(code: int) -> None:
    # A process group that lost a peer can stand for minutes in its destructor: it is not run.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
