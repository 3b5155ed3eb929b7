"""The page for people who write plugins, word by word: its files are written out and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"
_FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder with the page's files, installed as pip would have it."""
    files = dict(_FILE.findall(PAGE.read_text(encoding="utf-8")))
    assert "tests/test_pressure.py" in files
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    return tmp_path


def python(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def pytest_of(package: Path) -> subprocess.CompletedProcess[str]:
    return python(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", ".")


@pytest.mark.parametrize("package", ["everstep.sdk", "everstep.wire"])
def test_a_strangers_type_checker_reads_our_types(package: str) -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


ADMIT = """
import time
from pathlib import Path
from everstep.sdk import ConfigError, ConfigFile
from everstep.sdk.door import admit
file, offers = ConfigFile.load(Path("everstep.toml")), {"clock": time.time, "pages": list}
try:
    for one in admit(file, "collectors", offers):
        print(one.name, one.source, one.state, one.why, getattr(one.config, "memory_limit", ""))
except ConfigError as exc:
    print(exc)
"""


def test_the_pages_tests_pass(package: Path) -> None:
    done = pytest_of(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_the_pages_plugin_comes_in_through_the_door_with_its_table(package: Path) -> None:
    told = python(package, "-c", ADMIT).stdout.splitlines()
    (line,) = (one for one in told if one.startswith("pressure "))
    state = "on" if Path("/proc/pressure/memory").exists() else "unsupported"
    assert line.startswith(f"pressure everstep-pressure {state}")
    assert line.endswith(" 0.1")
    assert any(one.startswith("host everstep on") for one in told)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("memory_limt = 0.1", "unknown key 'memory_limt' (did you mean 'memory_limit'?)"),
        ("memory_limit = 2", "key 'memory_limit': Expected `float` <= 1.0"),
        ("memory_limit = 'much'", "key 'memory_limit': Expected `float`, got `str`"),
    ],
)
def test_a_mistake_in_its_table_is_told_as_the_page_says(
    package: Path, line: str, told: str
) -> None:
    (package / "everstep.toml").write_text(f"[collectors.pressure]\n{line}\n")
    done = python(package, "-c", ADMIT)
    assert done.stdout.startswith("everstep.toml: [collectors.pressure]")
    assert told in done.stdout


def test_a_plugin_that_cannot_be_imported_is_failed_and_the_others_are_on(package: Path) -> None:
    (package / "everstep_pressure" / "parse.py").write_text("import no_such_module\n")
    told = python(package, "-c", ADMIT).stdout.splitlines()
    assert "pressure everstep-pressure failed ModuleNotFoundError: No module named " in "".join(
        told
    )
    assert any(one.startswith("host everstep on") for one in told)


def test_the_suite_says_what_is_broken(package: Path) -> None:
    readme = package / "everstep_pressure" / "README.md"
    readme.write_text(readme.read_text().replace("`pressure.extent`", "").replace("## Limits", ""))
    done = pytest_of(package)
    assert done.returncode == 1
    assert "PressureCollector breaks the plugin contract:" in done.stdout
    assert "README.md has no heading `## Limits`" in done.stdout
