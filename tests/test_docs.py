"""The pages say what the code does: verbs, exit codes, dependencies, links, decisions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from everstep.cli.verbs import SECTIONS
from everstep.wire import exit_codes

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    p
    for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    if ".venv" not in p.parts
)
VERBS = {verb for section in SECTIONS.values() for verb in section}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=~!\[; ]", r)[0] for r in requirements}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_everstep_command_on_a_page_is_a_verb(page: Path) -> None:
    for verb in re.findall(r"(?:^|`)everstep ([a-z]+)", page.read_text(), flags=re.MULTILINE):
        assert verb in VERBS, f"{page.name}: everstep {verb}"


def test_the_readme_opens_with_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert re.findall(r"^make (\w+)", first, flags=re.MULTILINE) == ["demo", "test"]


def test_the_readme_explains_every_exit_code() -> None:
    table = (ROOT / "README.md").read_text().split("## Exit codes of a launcher")[1]
    told = {int(n) for n in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    assert told == {v for k, v in vars(exit_codes).items() if k.isupper()}


def test_every_dependency_is_defended() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    for name in names([*project["dependencies"], *extras["trainer"], *extras["demo"]]):
        assert name in page, f"{name} is not defended in docs/dependencies.md"


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(p.name[:4]) for p in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_make_has_the_verbs_that_the_pages_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for verb in (
        "setup",
        "demo",
        "test",
        "lint",
        "types",
        "fmt",
        "bench",
        "bench-peers",
        "chaos",
        "docs",
    ):
        assert re.search(rf"^{verb}:", makefile, flags=re.MULTILINE), verb
