"""Storms: ranks, launchers, agents and the coordinator are killed; one line for each."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.runs import Outcome, Storm, weather


def line(outcome: Outcome) -> dict[str, object]:
    return {
        "seed": outcome.storm.seed,
        "ranks": outcome.storm.nodes * outcome.storm.ranks,
        "layout": f"{outcome.storm.nodes}x{outcome.storm.ranks}",
        "good": outcome.good,
        "killed": dict(outcome.killed),
        "exit_codes": outcome.exit_codes,
        "final_step": outcome.final_step,
        "bit_equal": not outcome.differences and outcome.final_step == outcome.storm.steps,
        "waited_thirty_s": outcome.waited_thirty_s,
        "left_over": outcome.left_over,
        "took_s": round(outcome.took_s, 1),
        "trouble": outcome.trouble,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options."""
    parser.add_argument("--seeds", type=int, default=20, help="how many storms")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kills", type=int, default=7, help="kills in each")
    parser.add_argument("--out", type=Path, default=None, help="keep logs and snapshots here")


def main(asked: argparse.Namespace) -> int:
    out = asked.out or Path(tempfile.mkdtemp(prefix="everstep-chaos-"))
    good = 0
    for seed in range(asked.first, asked.first + asked.seeds):
        outcome = weather(Storm.of(seed, kills=asked.kills), out / f"seed{seed}")
        good += outcome.good
        print(json.dumps(line(outcome)), flush=True)
    sys.stderr.write(f"{good} of {asked.seeds} good; logs in {out}\n")
    return 0 if good == asked.seeds else 1
