"""A process with a collector of its own: the driver's library stays in a process once loaded.

    python -m tests.plugins.collectors.nvml.collector_seat RETRY_S

One command a line on stdin, its answer as JSON a line on stdout: `supported NOW_S`,
`collect NOW_S`, `contract NOW_S`.
"""

from __future__ import annotations

import sys

import msgspec

from everstep.plugins.collectors.nvml import NvmlCollector
from everstep.sdk import Reading
from everstep.sdk.testing import broken_rules


def main() -> None:
    """Answer until stdin ends."""
    now_s = 0.0
    collector = NvmlCollector(
        NvmlCollector.Config(retry_s=float(sys.argv[1])),
        mono_s=lambda: now_s,
        clock=lambda: 1e9 + now_s,
    )
    for line in sys.stdin:
        verb, text = line.split()
        now_s = float(text)
        answer: object
        if verb == "supported":
            answer = collector.supported()
        elif verb == "contract":
            answer = broken_rules(NvmlCollector, complete=True)
        else:
            seen = list(collector.collect())
            answer = {
                "readings": [one for one in seen if isinstance(one, Reading)],
                "findings": [one for one in seen if not isinstance(one, Reading)],
            }
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
