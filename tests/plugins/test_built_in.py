"""The built-in plugins keep the contract that strangers' plugins keep, and come in like them."""

from __future__ import annotations

import ast
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from opentelemetry.semconv._incubating.attributes import (
    cpu_attributes,
    disk_attributes,
    hw_attributes,
    network_attributes,
    system_attributes,
)
from opentelemetry.semconv._incubating.metrics import hw_metrics, system_metrics

from everstep.sdk.door import KINDS, Kind, installed
from everstep.sdk.testing import check_contract
from everstep.sdk.testing.subject import metrics

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "plugins" / "everstep" / "plugins"
PAGE = ROOT / "plugins" / "README.md"


def points(kind: Kind) -> dict[str, EntryPoint]:
    """Return our own entry points of one kind."""
    return {n: p for n, p in installed(kind).items() if p.module.startswith("everstep.plugins.")}


def folders(kind: Kind) -> dict[str, Path]:
    """Return the folders of one kind that hold a plugin."""
    return {f.parent.name: f.parent for f in (FOLDERS / kind).glob("*/__init__.py")}


ALL = [(kind, name) for kind in KINDS for name in folders(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_folder_is_an_entry_point_and_every_entry_point_a_folder(kind: Kind) -> None:
    assert folders(kind).keys() == points(kind).keys()
    for name, point in points(kind).items():
        assert point.module == f"everstep.plugins.{kind}.{name}"


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_it_keeps_the_contract(kind: Kind, name: str) -> None:
    check_contract(points(kind)[name], complete=name == "host")


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_it_has_tests_of_its_own(kind: Kind, name: str) -> None:
    here = ROOT / "tests" / "plugins" / kind
    assert [*here.glob(f"test_{name}*.py"), *here.glob(f"{name}/test_*.py")]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_its_page_opens_with_the_sentence_of_its_package(kind: Kind, name: str) -> None:
    readme = (folders(kind)[name] / "README.md").read_text(encoding="utf-8")
    title, _, opening = readme.partition("\n\n")
    assert title == f"# {name}"
    assert " ".join(opening.split("\n\n")[0].split()) == sentence(kind, name)


# --------------------------------------------------------------- names that others agreed on


def _convention(module: ModuleType) -> dict[str, tuple[str, bool]]:
    """Return unit and whether it only grows, by name, as the conventions' package has them."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    names = dict(re.findall(r'^(\w+): Final = "([\w.]+)"', source, re.MULTILINE))
    made = re.findall(r"def create_\w+\((.*?)unit=\"(.+?)\"", source, re.DOTALL)
    out: dict[str, tuple[str, bool]] = {}
    for body, unit in made:
        (constant,) = re.findall(r"name=(\w+)", body)
        counter = "create_counter(" in body or "create_observable_counter(" in body
        out[names[constant]] = (unit, counter)
    return out


CONVENTIONS = _convention(system_metrics) | _convention(hw_metrics)
ATTRIBUTES = {
    value
    for module in (
        cpu_attributes,
        disk_attributes,
        hw_attributes,
        network_attributes,
        system_attributes,
    )
    for name, value in vars(module).items()
    if name.isupper()
}


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_metric_has_the_conventions_name_and_unit_or_a_name_of_our_own(
    kind: Kind, name: str
) -> None:
    readme = (folders(kind)[name] / "README.md").read_text(encoding="utf-8")
    for metric, row in metrics(readme).items():
        if not metric.startswith("everstep."):
            assert CONVENTIONS[metric] == (row.unit, row.counter), metric
        for attribute in row.attributes:
            assert attribute.startswith("everstep.") or attribute in ATTRIBUTES, metric


# ------------------------------------------------------------------- the table of all plugins


def sentence(kind: Kind, name: str) -> str:
    """Return what a plugin says of itself, without importing it."""
    module = ast.parse((folders(kind)[name] / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(module) or "").split())


def table() -> str:
    """Return the table of plugins/README.md."""
    rows = [
        f"| {kind} | [{name}](everstep/plugins/{kind}/{name}/README.md) | {sentence(kind, name)} |"
        for kind, name in sorted(ALL)
    ]
    return "\n".join(["| Kind | Plugin | What it does |", "|---|---|---|", *rows])


_MARKED = re.compile(r"(<!-- plugins: .*?-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def test_the_page_lists_every_plugin() -> None:
    found = _MARKED.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2].strip() == table(), f"run python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MARKED.sub(lambda m: f"{m[1]}{table()}\n{m[3]}", text), encoding="utf-8")
