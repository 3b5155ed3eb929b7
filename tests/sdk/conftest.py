"""Packages that a stranger might have installed, without pip: a folder on sys.path is enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., str]
_numbers = itertools.count()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs one module as a distribution and returns its name.

    `points` maps an entry-point group's kind to names and objects, e.g.
    `{"collectors": {"leak": "LeakCollector"}}`.
    """

    def put(code: str, points: Mapping[str, Mapping[str, str]], *, dist: str = "") -> str:
        module = f"stranger_{next(_numbers)}"
        dist = dist or module.replace("_", "-")
        site = tmp_path / module
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(dedent(code), encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = []
        for kind, named in points.items():
            lines.append(f"[everstep.{kind}]")
            lines += [f"{name} = {module}:{thing}" for name, thing in named.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(site)
        return dist

    return put
