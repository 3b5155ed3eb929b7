"""What it takes to bring a state back: `python tests/bench/restore.py [--quick]`.

From this node's memory, beside a plain copy of as many bytes; from disk, beside a plain read of the
same files, which are in no cache. Everything is verified on the way. The last line on stdout is one
JSON object.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form
from tests.bench.form import Form
from tests.bench.snapshot import on_ranks

TARGETS = {
    "memory_over_copy": 1.3,
    "disk_over_read": 1.2,
    "two_ranks_memory_over_copy": 1.3,
    "two_ranks_disk_over_read": 1.2,
}


def main() -> None:
    """Measure and print."""
    quick = form.options(__doc__).parse_args().quick
    size_gb, repeats = (0.064, 3) if quick else (1.0, 9)
    report = Form("restore", TARGETS, runs=repeats)
    for ranks, prefix in ((1, ""), (2, "two_ranks_")):
        form.await_quiet(0.0 if quick else 60.0)
        form.say(f"{ranks} rank(s), {size_gb} GB")
        with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
            found = on_ranks("loads.py", size_gb, ranks, repeats, Path(folder))
        for name, value in found.items():
            report.put(f"{prefix}{name}", value)
    report.print()


if __name__ == "__main__":
    main()
