"""Runs every benchmark, one after another, and writes bench-results.json and bench-results.md.

    python tests/bench/run_all.py [--quick] [--only NAME ...] [--out DIR]

One that fails does not stop the others; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHES = ("hooks", "agent", "coordinator", "snapshot", "restore", "mttr")
_LONGEST_S, _CLOSE_S = 7200.0, 60.0


def main() -> int:
    """Run them and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, no peers")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(), help="where the results go")
    asked = parser.parse_args()
    found, failed = [], {}
    for name in asked.only:
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            found.append(run(name, quick=asked.quick))
        except RuntimeError as exc:
            failed[name] = str(exc)
            print(f"{name} failed: {exc}", file=sys.stderr, flush=True)
    write(asked.out, found, failed, quick=asked.quick)
    return 1 if failed else 0


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """Run one benchmark and return its line. Raises RuntimeError when it does not give one."""
    command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if quick else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=_LONGEST_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as exc:
            process.send_signal(signal.SIGINT)  # it has processes of its own to take along
            process.wait(_CLOSE_S)
            if isinstance(exc, KeyboardInterrupt):
                raise
            raise RuntimeError(f"not done after {_LONGEST_S:.0f} s") from exc
    if process.returncode:
        raise RuntimeError(f"it ended with {process.returncode}")
    lines = said.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError) as exc:
        raise RuntimeError("its last line is no JSON") from exc
    return found


def write(out: Path, found: list[dict[str, Any]], failed: dict[str, str], *, quick: bool) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    whole = {"at": at, "quick": quick, "benches": found, "failed": failed}
    (out / "bench-results.json").write_text(json.dumps(whole, indent=1) + "\n")
    (out / "bench-results.md").write_text(table(whole))
    print(f"{out / 'bench-results.json'} and {out / 'bench-results.md'} written", file=sys.stderr)


def table(whole: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [f"# Benchmarks, {whole['at']}{' (quick)' if whole['quick'] else ''}", ""]
    for bench in whole["benches"]:
        lines += [f"## {bench['bench']}", "", f"{bench['machine']}; runs: {bench['runs']}", ""]
        lines += ["| figure | value | target | peer |", "|---|---|---|---|"]
        lines += [_row(bench, name, value) for name, value in bench["figures"].items()]
        lines += ["", *(f"* `{name}`: {why}" for name, why in bench["why"].items()), ""]
    lines += [f"**{name} failed**: {why}\n" for name, why in whole["failed"].items()]
    return "\n".join(lines).rstrip() + "\n"


def _row(bench: dict[str, Any], name: str, value: object) -> str:
    peers = [
        f"{peer} {_shown(figures[name])}"
        for peer, figures in bench["peers"].items()
        if name in figures
    ]
    target = bench["targets"].get(name)
    aim = "" if target is None else f"{_shown(target)}"
    return f"| {name} | {_shown(value)} | {aim} | {', '.join(peers)} |"


def _shown(value: object) -> str:
    return "-" if value is None else f"{value}"


if __name__ == "__main__":
    sys.exit(main())
