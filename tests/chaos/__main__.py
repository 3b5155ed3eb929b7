"""`python -m tests.chaos [storms | snapshots | kills | elastic | leaks] [options]`.

Without a name it is storms. `python -m tests.chaos NAME --help` tells the options.
"""

from __future__ import annotations

import argparse
import importlib
import sys

PROGRAMS = {
    "storms": "tests.chaos.storms",
    "snapshots": "tests.chaos.snapshots.program",
    "kills": "tests.chaos.kills",
    "elastic": "tests.chaos.elastic",
    "leaks": "tests.chaos.leaks",
}


def main(words: list[str]) -> int:
    name = words[0] if words and words[0] in PROGRAMS else "storms"
    program = importlib.import_module(PROGRAMS[name])
    description = f"{__doc__}\n\n{name}: {program.__doc__}"
    parser = argparse.ArgumentParser(
        f"tests.chaos {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.arguments(parser)
    return int(program.main(parser.parse_args(words[1:] if words[:1] == [name] else words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
