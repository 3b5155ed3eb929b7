"""Installs the peers of the benchmarks, each in a venv of its own.

    python tests/bench/peers/install.py [NAME ...]

They go to build/peers, or to $EVERSTEP_PEERS. One that is there as its requirements say is left
alone. One that cannot be installed does not stop the others: the benchmarks then show null for it,
and why. Nothing but the benchmarks needs them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers.venvs import PEERS, Peer, root

_TELLING = 400


def main() -> int:
    """Install those asked for; 1 when one of them is missing then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    asked = parser.parse_args()
    if unknown := [n for n in asked.names if n not in PEERS]:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    missing = [name for name in asked.names or PEERS if not bring(PEERS[name])]
    if missing:
        print(f"the benchmarks will run without {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def bring(peer: Peer) -> bool:
    """Install one unless it is there; False, with the reason told and kept, when that fails."""
    if not peer.missing():
        print(f"{peer.name}: already in {peer.folder}", flush=True)
        return True
    print(f"{peer.name}: installing into {peer.folder}", flush=True)
    try:
        install(peer)
    except RuntimeError as exc:
        peer.failure.write_text(str(exc))
        print(f"{peer.name}: {exc}", file=sys.stderr, flush=True)
        return False
    peer.failure.unlink(missing_ok=True)
    print(f"{peer.name}: ready", flush=True)
    return True


def install(peer: Peer) -> None:
    """Make the venv anew. Raises RuntimeError saying which part failed."""
    shutil.rmtree(peer.folder, ignore_errors=True)
    root().mkdir(parents=True, exist_ok=True)
    venv.create(peer.folder, with_pip=True)
    wheels = root() / "wheels"
    wheels.mkdir(exist_ok=True)
    requirements = peer.requirements.read_text()
    # torch by itself first, so that no peer's wish brings another one.
    if torch := [r for r in requirements.split() if r.startswith("torch==")]:
        _pip(peer, "install", *torch)
    if peer.foreign_wheel:
        retag(peer, wheels, *peer.foreign_wheel)
    _pip(peer, "install", f"--find-links={wheels}", f"--requirement={peer.requirements}")
    for module in peer.modules:
        _run([str(peer.python), "-c", f"import {module}"], f"import {module}")
    peer.mark.write_text(requirements)


def retag(peer: Peer, wheels: Path, requirement: str, python: str, platform: str) -> None:
    """Download a wheel made for another interpreter and give it a name that fits every one.

    pip reads what a wheel is for from its file name alone. What is plain Python in it then works;
    its native modules do not load, and the peer must do without them.
    """
    with tempfile.TemporaryDirectory(dir=wheels) as folder:
        only = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        _pip(
            peer,
            "download",
            "--no-deps",
            *only,
            f"--platform={platform}",
            f"--dest={folder}",
            requirement,
        )
        (wheel,) = Path(folder).glob("*.whl")
        wheel.rename(wheels / any_python(wheel.name))


def any_python(wheel: str) -> str:
    """Return the wheel's file name with the tags of a pure Python one.

    >>> any_python("a_b-0.7.0-cp312-cp312-manylinux_2_39_x86_64.whl")
    'a_b-0.7.0-py3-none-any.whl'
    """
    name, version, *_ = wheel.split("-")
    return f"{name}-{version}-py3-none-any.whl"


def _pip(peer: Peer, verb: str, *arguments: str) -> None:
    command = [str(peer.python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check"]
    _run([*command, *arguments], f"pip {verb} {arguments[-1]}")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(f"{what}: {said[-_TELLING:]}")


if __name__ == "__main__":
    sys.exit(main())
