"""Rules about what is written down: the configuration, README.md and sample.toml."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from everstep.sdk.config import ConfigError, convert
from everstep.sdk.testing.subject import section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everstep.sdk.testing.subject import Subject

HEADINGS = ("Watches", "Configuration", "Metrics", "Findings", "Needs", "Limits")


def config_is_a_frozen_struct(subject: Subject) -> Iterator[str]:
    """A config is a value: nobody changes it after it was validated."""
    config = getattr(subject.cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        yield "it has no `Config` that is a msgspec.Struct"
        return
    if not config.__struct_config__.frozen:
        yield f"{config.__name__} is not frozen: declare it with frozen=True"
    if not config.__struct_config__.forbid_unknown_fields:
        yield (
            f"{config.__name__} takes keys that it does not know: declare it with "
            "forbid_unknown_fields=True"
        )


def config_has_sound_defaults(subject: Subject) -> Iterator[str]:
    """An empty table is a valid one; msgspec itself does not look at defaults."""
    config = subject.cls.Config
    required = [f.name for f in msgspec.structs.fields(config) if f.required]
    if required:
        yield f"{config.__name__} has no default for {', '.join(required)}"
        return
    try:
        convert(msgspec.to_builtins(config()), config, where="its own defaults")
    except (ConfigError, ValueError, TypeError) as exc:
        yield f"{config.__name__}'s defaults are not valid: {exc}"


def config_leaves_enabled_to_the_door(subject: Subject) -> Iterator[str]:
    """The key turns any plugin off, before its own table is read."""
    if "enabled" in subject.cls.Config.__struct_fields__:
        yield "Config has a field `enabled`: the door takes that key, the plugin never sees it"


def collector_says_how_often(subject: Subject) -> Iterator[str]:
    """What is to be called over and over says how often, and never zero."""
    if subject.kind != "collectors":
        return
    config = subject.cls.Config
    if "interval_s" not in config.__struct_fields__:
        yield "Config has no field `interval_s` (everstep.sdk.Seconds) that says how often to look"
        return
    for bad in (0, -1.0, float("inf"), float("nan")):
        try:
            convert({"interval_s": bad}, config, where="")
        except ConfigError:
            continue
        yield f"Config takes interval_s = {bad}: declare it as everstep.sdk.Seconds"


def readme_has_the_headings(subject: Subject) -> Iterator[str]:
    """Who knows one plugin's page finds their way on every other one."""
    readme = subject.text("README.md")
    if readme is None:
        yield f"there is no README.md in {subject.folder}"
        return
    found = tuple(h for h in re.findall(r"^## (.+?)\s*$", readme, re.MULTILINE) if h in HEADINGS)
    for heading in HEADINGS:
        if heading not in found:
            yield f"README.md has no heading `## {heading}`"
        elif not section(readme, heading).strip():
            yield f"README.md says nothing under `## {heading}`; when there is nothing, say so"
    if len(found) == len(HEADINGS) and found != HEADINGS:
        yield f"README.md's headings come in the order {', '.join(HEADINGS)}"


def sample_equals_the_defaults(subject: Subject) -> Iterator[str]:
    """A sample that drifted from the code misleads whoever copies from it."""
    if subject.text("sample.toml") is None:
        yield f"there is no sample.toml in {subject.folder}"
        return
    table = subject.table
    if table is None:
        called = subject.name or "<name of the entry point>"
        yield f"sample.toml is not TOML with a table [{subject.kind}.{called}]"
        return
    table = {key: value for key, value in table.items() if key != "enabled"}
    try:
        config = convert(table, subject.cls.Config, where="sample.toml")
    except ConfigError as exc:
        yield str(exc)
        return
    default = subject.cls.Config()
    for name in default.__struct_fields__:
        shown, is_ = getattr(config, name), getattr(default, name)
        if shown != is_:
            yield f"sample.toml shows {name} = {shown!r}, the default is {is_!r}"


def sample_explains_every_option(subject: Subject) -> Iterator[str]:
    """Every option stands there, set or commented out, below a comment in plain words."""
    lines = (subject.text("sample.toml") or "").splitlines()
    for name in subject.cls.Config.__struct_encode_fields__:
        option = re.compile(rf"#?\s*{re.escape(name)}\s*=")
        at = next((n for n, line in enumerate(lines) if option.match(line)), None)
        if at is None:
            yield f"sample.toml does not mention {name} (comment it out if its default is none)"
        elif "#" not in lines[at].partition("=")[2] and not re.match(
            r"#\s*\S", lines[at - 1] if at else ""
        ):
            yield f"sample.toml has no comment above {name} that says what it does"
