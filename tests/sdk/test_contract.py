"""The suite for third parties: each rule is broken once, on purpose, and must be reported."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import pytest

from everstep.sdk import Reading
from everstep.sdk.testing import ContractError, broken_rules, check_contract

CODE = """
    import time
    from typing import Literal

    import msgspec
    from everstep.sdk import Evidence, Finding, Reading, Seconds

    class ThingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        interval_s: Seconds = 2.0
        mode: Literal["a", "b"] = "a"
        limit: int | None = None

    class Thing:
        Config = ThingConfig
        total = 0

        def __init__(self, config, pages):
            self.config = config

        def supported(self):
            return None

        def collect(self):
            self.total += 1
            return [
                Reading(name="thing.level", value=1.0, unit="Cel", attributes={"thing.id": "x"}),
                Reading(name="thing.total", value=self.total, unit="{thing}", counter=True),
                Finding(
                    name="thing.hot", component="host", severity="error", summary="hot", at_s=1.0
                ),
            ]

        def state(self):
            return {"total": self.total}

        def restore(self, state):
            self.total = int(state.get("total", 0))
"""

README = """\
# thing

## Watches

A thing.

## Configuration

See sample.toml.

## Metrics

| Name | Unit | Kind | Attributes | Meaning |
|---|---|---|---|---|
| `thing.level` | `Cel` | gauge | `thing.id` | how warm it is |
| `thing.total` | `{thing}` | counter | | how many there were |

## Findings

| Name | Severity | Meaning |
|---|---|---|
| `thing.hot` | error | it is hot |

## Needs

Nothing.

## Limits

None.
"""

SAMPLE = """\
[collectors.thing]
# Seconds between two looks.
interval_s = 2.0
# How it looks: a or b.
mode = "a"
# From where on it is too warm; without it nothing is.
# limit = 90
"""

_numbers = itertools.count()
Make = Callable[..., type]


@pytest.fixture
def plugin(tmp_path: Path) -> Make:
    """Return a function that writes a plugin's folder, with one thing changed, and loads it."""

    def make(file: str = "", old: str = "", new: str = "") -> type:
        files = {"thing.py": dedent(CODE), "README.md": README, "sample.toml": SAMPLE}
        if file:
            assert old in files[file], f"{old!r} is not in {file}"
            files[file] = files[file].replace(old, new)
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        module_name = f"contract_thing_{next(_numbers)}"
        spec = importlib.util.spec_from_file_location(module_name, tmp_path / "thing.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        cls: type = module.Thing
        return cls

    return make


def test_a_plugin_that_keeps_every_rule_passes(plugin: Make) -> None:
    check_contract(plugin(), complete=True)


BROKEN = {
    "config is a class of another kind": (
        ("thing.py", "    Config = ThingConfig", "    Config = dict"),
        "no `Config` that is a msgspec.Struct",
    ),
    "config can be changed": (("thing.py", "frozen=True, ", ""), "not frozen"),
    "config takes unknown keys": (
        ("thing.py", ", forbid_unknown_fields=True", ""),
        "takes keys that it does not know",
    ),
    "config has a field without a default": (
        ("thing.py", 'mode: Literal["a", "b"] = "a"', 'mode: Literal["a", "b"]'),
        "no default for mode",
    ),
    "config has a default that is not valid": (
        ("thing.py", '"b"] = "a"', '"b"] = "c"'),
        "defaults are not valid: its own defaults: key 'mode'",
    ),
    "config has the door's own key": (
        ("thing.py", "limit: int", "enabled: bool = True\n    limit: int"),
        "field `enabled`",
    ),
    "collector has no interval": (
        ("thing.py", "interval_s: Seconds = 2.0", "every_s: Seconds = 2.0"),
        "no field `interval_s`",
    ),
    "interval may be zero": (
        ("thing.py", "interval_s: Seconds", "interval_s: float"),
        "takes interval_s = 0",
    ),
    "readme has a heading less": (
        ("README.md", "## Limits", "## Limitations"),
        "no heading `## Limits`",
    ),
    "readme has an empty section": (
        ("README.md", "Nothing.\n", ""),
        "says nothing under `## Needs`",
    ),
    "readme has its headings in another order": (
        (
            "README.md",
            "## Watches\n\nA thing.\n\n## Configuration",
            "## Configuration\n\nA\n\n## Watches",
        ),
        "come in the order Watches, Configuration",
    ),
    "sample is not toml": (("sample.toml", 'mode = "a"', "mode ="), "sample.toml is not TOML"),
    "sample has another table": (
        ("sample.toml", "[collectors.thing]", "[detectors.thing]"),
        "sample.toml is not TOML with a table [collectors.",
    ),
    "sample shows another value": (
        ("sample.toml", "interval_s = 2.0", "interval_s = 0.7"),
        "sample.toml shows interval_s = 0.7, the default is 2.0",
    ),
    "sample has a key that is not there": (
        ("sample.toml", 'mode = "a"', 'mood = "a"'),
        "unknown key 'mood' (did you mean 'mode'?)",
    ),
    "sample leaves an option out": (
        ("sample.toml", "# limit = 90\n", ""),
        "does not mention limit",
    ),
    "sample does not explain an option": (
        ("sample.toml", "# How it looks: a or b.\n", ""),
        "no comment above mode",
    ),
    "verb wants an argument": (
        ("thing.py", "def collect(self)", "def collect(self, when)"),
        "collect() is called with 0 argument(s) beside self",
    ),
    "constructor asks for what is not on offer": (
        ("thing.py", "config, pages", "config, moon"),
        "asks for moon; on offer here: clock, pages",
    ),
    "constructor raises": (
        ("thing.py", "self.config = config", "raise OSError('no sensor')"),
        "its constructor raised OSError: no sensor",
    ),
    "supported returns a bool": (
        ("thing.py", "return None", "return True"),
        "supported() returned True",
    ),
    "supported raises": (
        ("thing.py", "return None", "raise OSError('eh')"),
        "supported() raised OSError: eh",
    ),
    "collect raises": (
        ("thing.py", "self.total += 1", "raise FileNotFoundError('/dev/thing')"),
        "collect() raised FileNotFoundError: /dev/thing",
    ),
    "collect exits": (
        ("thing.py", "self.total += 1", "raise SystemExit(3)"),
        "collect() raised SystemExit: 3",
    ),
    "collect raises the second time": (
        ("thing.py", "self.total += 1", "self.total += 1; 1 / (2 - self.total)"),
        "collect(), called again, raised ZeroDivisionError",
    ),
    "collect takes longer than its interval": (
        ("thing.py", "self.total += 1", "time.sleep(30)"),
        "collect() did not come back within 2 s",
    ),
    "collect returns nothing": (
        ("thing.py", "self.total += 1", "return None"),
        "collect() returned None instead of a list",
    ),
    "collect returns something else": (
        ("thing.py", "self.total += 1", "return [{'thing.level': 1}]"),
        "neither Reading nor Finding",
    ),
    "a reading has no unit": (
        ("thing.py", 'unit="Cel"', 'unit=""'),
        "thing.level has no unit",
    ),
    "a reading is not documented": (
        ("README.md", "| `thing.total`", "| `thing.sum`"),
        "thing.total is not in the table under `## Metrics` of README.md: "
        "add | `thing.total` | `{thing}` | counter |",
    ),
    "a unit is documented wrongly": (
        ("README.md", "| `Cel`", "| `K`"),
        "thing.level is a `Cel` gauge, README.md says a `K` gauge",
    ),
    "a counter is documented as a gauge": (
        ("README.md", "| counter |", "| gauge |"),
        "thing.total is a `{thing}` counter, README.md says a `{thing}` gauge",
    ),
    "an attribute is not documented": (
        ("README.md", "| `thing.id` |", "| |"),
        "README.md does not list attribute `thing.id` of thing.level",
    ),
    "a finding is not documented": (
        ("README.md", "| `thing.hot`", "| `thing.warm`"),
        "finding thing.hot is not in the table under `## Findings`",
    ),
    "a counter goes down": (
        ("thing.py", "self.total += 1", "self.total = 5 - self.total"),
        "thing.total is a counter and went down",
    ),
    "a series comes twice": (
        (
            "thing.py",
            'name="thing.total", value=self.total, unit="{thing}", counter=True',
            'name="thing.level", value=2.0, unit="Cel", attributes={"thing.id": "x"}',
        ),
        "thing.level comes more than once with the same attributes",
    ),
    "a documented metric never comes": (
        (
            "thing.py",
            'Reading(name="thing.total", value=self.total, unit="{thing}", counter=True),',
            "",
        ),
        "README.md documents what collect() did not return: thing.total",
    ),
    "state does not go through JSON": (
        ("thing.py", 'return {"total": self.total}', "return {1, 2}"),
        "state() is not JSON-able",
    ),
    "an older state does harm": (
        ("thing.py", 'state.get("total", 0)', 'state["total"]'),
        "restore({}) raised KeyError",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_rule_is_reported(plugin: Make, how: str) -> None:
    change, told = BROKEN[how]
    broken = broken_rules(plugin(*change), kind="collectors", complete=True)
    assert any(told in rule for rule in broken), broken


def test_everything_that_is_broken_is_said_at_once(plugin: Make) -> None:
    cls = plugin("README.md", "## Limits", "## Limitations")
    (Path(sys.modules[cls.__module__].__file__ or "").parent / "sample.toml").unlink()
    with pytest.raises(ContractError) as caught:
        check_contract(cls)
    assert "Thing breaks the plugin contract:\n  - " in str(caught.value)
    assert "`## Limits`" in str(caught.value)
    assert "there is no sample.toml" in str(caught.value)


def test_a_plugin_without_a_page_is_told_where_it_belongs(plugin: Make, tmp_path: Path) -> None:
    cls = plugin()
    (tmp_path / "README.md").unlink()
    assert f"there is no README.md in {tmp_path}" in broken_rules(cls)


def test_the_papers_may_lie_elsewhere(plugin: Make, tmp_path: Path) -> None:
    cls = plugin()
    (tmp_path / "papers").mkdir()
    for name in ("README.md", "sample.toml"):
        (tmp_path / name).rename(tmp_path / "papers" / name)
    check_contract(cls, folder=tmp_path / "papers")


def test_what_the_constructor_needs_may_be_handed_in(plugin: Make) -> None:
    cls = plugin("thing.py", "config, pages", "config, moon")
    check_contract(cls, offers={"moon": "full"})


def test_a_class_of_no_kind_is_told_what_the_kinds_are() -> None:
    class Nothing:
        pass

    (told,) = broken_rules(Nothing)
    assert "collect(), detect(), act(), notify() or a moment of training (run_start" in told


def test_an_entry_point_of_a_group_that_does_not_exist_is_told_the_groups() -> None:
    (told,) = broken_rules(EntryPoint("x", "os:path", "everstep.collector"))
    assert "group everstep.collector; the groups are everstep.collectors" in told


def test_an_entry_point_that_cannot_be_imported_is_told_why() -> None:
    (told,) = broken_rules(EntryPoint("x", "no_such_module:X", "everstep.collectors"))
    assert "ModuleNotFoundError" in told


DETECTOR = """
    import msgspec
    from everstep.sdk import Finding

    class DriftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        pass

    class Thing:
        Config = DriftConfig
        shared = []

        def __init__(self, config):
            pass

        def detect(self, readings, now_s):
            return BODY
"""

FOUND = 'Finding(name="thing.hot", component="host", severity="error", summary="", at_s=now_s)'


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (f"[{FOUND} for r in readings if r.name == 'thing.level']", None),
        ("[readings[0]]", "detect() raised"),
        ("[r.value > 3 for r in readings]", "detect() raised TypeError"),
        ("[1 for r in readings]", "which is no Finding"),
        ("7", "instead of a list"),
        (
            f"[{FOUND}] if (self.shared.append(1) or len(self.shared)) > 7 else []",
            "it is to be pure",
        ),
    ],
)
def test_a_detector_is_fed_with_oddities_and_must_be_pure(
    plugin: Make, tmp_path: Path, body: str, told: str | None
) -> None:
    cls = plugin("thing.py", dedent(CODE), dedent(DETECTOR).replace("BODY", body))
    (tmp_path / "sample.toml").write_text("[detectors.thing]\n")
    broken = broken_rules(cls, readings=[Reading(name="thing.level", value=99.0, unit="Cel")])
    assert (broken == []) if told is None else any(told in rule for rule in broken), broken


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("def after_update(self, step): ...", None),
        ("def after_updates(self, step): ...", "after_updates() is no moment"),
        ("def after_update(self): ...", "after_update() takes one argument beside self"),
    ],
)
def test_a_hook_knows_the_moments_of_training(
    plugin: Make, tmp_path: Path, method: str, told: str | None
) -> None:
    code = dedent(DETECTOR).replace(
        "def detect(self, readings, now_s):", f"{method}\n\n    def other(self):"
    )
    cls = plugin("thing.py", dedent(CODE), code.replace("BODY", "None"))
    (tmp_path / "sample.toml").write_text("[hooks.thing]\n")
    broken = broken_rules(cls, kind="hooks")
    assert (broken == []) if told is None else any(told in rule for rule in broken), broken


@pytest.mark.parametrize(("kind", "verb"), [("actions", "act"), ("notifiers", "notify")])
def test_what_would_act_is_looked_at_and_never_called(
    plugin: Make, tmp_path: Path, kind: str, verb: str
) -> None:
    code = dedent(DETECTOR).replace(
        "def detect(self, readings, now_s):", f"def {verb}(self, what):"
    )
    cls = plugin("thing.py", dedent(CODE), code.replace("return BODY", "raise SystemExit(1)"))
    (tmp_path / "sample.toml").write_text(f"[{kind}.thing]\n")
    assert broken_rules(cls) == []
