"""Every mistake in the file says where it is and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.sdk import ConfigError, ConfigFile, Seconds
from everstep.sdk import config as config_module
from everstep.sdk.config import convert


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    depth: int = 1


class Sensor(msgspec.Struct, frozen=True, kw_only=True):
    interval_s: Seconds = 1.0
    mode: Literal["calm", "eager"] = "calm"
    names: tuple[str, ...] = ()
    inner: Inner = Inner()
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 3:
            raise ValueError(f"limit must be at least 3, not {self.limit}")


def load(tmp_path: Path, text: str) -> ConfigFile:
    path = tmp_path / "everstep.toml"
    path.write_text(text, encoding="utf-8")
    return ConfigFile.load(path)


def test_a_table_becomes_its_type_and_the_rest_keeps_its_defaults(tmp_path: Path) -> None:
    file = load(tmp_path, '[collectors.sensor]\ninterval_s = 5\nnames = ["a"]\n')
    sensor = file.section("collectors.sensor", Sensor)
    assert sensor == Sensor(interval_s=5.0, names=("a",))


def test_a_table_that_nobody_wrote_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "").section("collectors.sensor", Sensor) == Sensor()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("intervall_s = 5", ["unknown key 'intervall_s'", "did you mean 'interval_s'?", "mode"]),
        ("zzz = 5", ["unknown key 'zzz'; known keys: interval_s, mode, names, inner, limit"]),
        ("interval_s = 'fast'", ["key 'interval_s'", "Expected `float`, got `str`"]),
        ("interval_s = true", ["key 'interval_s'", "Expected `float`, got `bool`"]),
        ("interval_s = 0", ["key 'interval_s'", "> 0.0"]),
        ("interval_s = nan", ["key 'interval_s'"]),
        ("interval_s = inf", ["key 'interval_s'", "<= 604800.0"]),
        ("mode = 'hasty'", ["key 'mode'", "'hasty'", "allowed: 'calm', 'eager'"]),
        ("names = [1]", ["key 'names[0]'", "Expected `str`, got `int`"]),
        ("limit = 2", ["limit must be at least 3, not 2"]),
        ("inner = {dept = 2}", ["unknown key 'inner.dept'", "did you mean 'depth'?"]),
        ("inner = {depth = 'x'}", ["key 'inner.depth'", "Expected `int`"]),
        ("inner = 3", ["key 'inner'", "Expected `object`, got `int`"]),
    ],
)
def test_a_wrong_table_says_file_table_key_and_what_is_allowed(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    file = load(tmp_path, f"[collectors.sensor]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        file.section("collectors.sensor", Sensor)
    for part in [str(tmp_path / "everstep.toml"), "[collectors.sensor]", *told]:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["collectors = 3", "[collectors]\nsensor = 3"])
def test_a_value_where_a_table_belongs_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[collectors.sensor\] must be a table, not 3"):
        load(tmp_path, text).section("collectors.sensor", Sensor)


def test_an_unknown_plugin_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = load(tmp_path, "[collectors.hots]\n")
    with pytest.raises(ConfigError) as caught:
        file.check_names("collectors", ["nvml", "host"], what="collector plugin")
    assert "[collectors.hots]: unknown collector plugin 'hots'" in str(caught.value)
    assert "did you mean 'host'?" in str(caught.value)
    assert "known: host, nvml" in str(caught.value)


def test_an_unknown_table_at_the_top_is_named(tmp_path: Path) -> None:
    file = load(tmp_path, "[agnet]\n")
    with pytest.raises(ConfigError, match=r"unknown table 'agnet' \(did you mean 'agent'\?\)"):
        file.check_names("", ["agent"], what="table")


def test_a_plugin_kind_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[collectors\] must be a table"):
        load(tmp_path, "collectors = []").check_names("collectors", ["host"], what="plugin")


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        ConfigFile.load(tmp_path / "nothing.toml")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ConfigFile.load(tmp_path)


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        ConfigFile.load(tmp_path / "x.toml")


def test_broken_toml_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        load(tmp_path, "[agent]\nnode = \n")


def test_the_first_usual_file_that_exists_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.toml").write_text("[agent]\nnode = 'b'\n")
    usual = (tmp_path / "a.toml", tmp_path / "b.toml")
    monkeypatch.setattr(config_module, "DEFAULT_PATHS", usual)
    assert ConfigFile.load(None).tables == {"agent": {"node": "b"}}
    (tmp_path / "b.toml").unlink()
    assert ConfigFile.load(None) == ConfigFile()
    assert ConfigFile.load(None).where == "built-in defaults"


def test_a_usual_file_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").mkdir()
    (tmp_path / "b.toml").write_text("")
    usual = (tmp_path / "a.toml", tmp_path / "b.toml")
    monkeypatch.setattr(config_module, "DEFAULT_PATHS", usual)
    with pytest.raises(ConfigError, match=r"a\.toml: cannot be read"):
        ConfigFile.load(None)


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    raw=st.dictionaries(
        st.sampled_from(Sensor.__struct_fields__) | st.text(max_size=8), _values, max_size=6
    )
)
def test_whatever_a_table_holds_it_is_a_value_or_a_readable_error(raw: dict[str, Any]) -> None:
    told = ""
    sensor = Sensor()
    try:
        sensor = convert(raw, Sensor, where="x.toml: [sensor]")
    except ConfigError as exc:
        told = str(exc)
    assert told.startswith("x.toml: [sensor]") or set(raw) <= set(Sensor.__struct_fields__)
    assert 0 < sensor.interval_s <= 7 * 86400
