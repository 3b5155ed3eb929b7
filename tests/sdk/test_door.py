"""Whatever a stranger's plugin does at the door, the others come in and the daemon goes on."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.sdk import ConfigError, ConfigFile
from everstep.sdk.door import KINDS, Admitted, admit, check, installed

Install = Callable[..., str]

SOUND = """
    import msgspec
    from everstep.sdk import Reading

    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        interval_s: float = 3.0

    class Sound:
        Config = Config

        def __init__(self, config, pages, more=7):
            self.config, self.pages, self.more = config, pages, more

        def collect(self):
            return [Reading(name="sound.level", value=self.config.interval_s)]
"""


OFFERS: dict[str, object] = {"clock": time.time, "pages": list}


def config(**tables: Any) -> ConfigFile:
    return ConfigFile(Path("everstep.toml"), {"collectors": tables})


def collectors(file: ConfigFile, **options: Any) -> dict[str, Admitted]:
    return {a.name: a for a in admit(file, "collectors", OFFERS, **options)}


def test_a_plugin_from_another_package_is_found_validated_and_made(install: Install) -> None:
    dist = install(SOUND, {"collectors": {"sound": "Sound"}})
    found = collectors(config(sound={"interval_s": 5}))["sound"]
    assert (found.state, found.why, found.source) == ("on", "", dist)
    assert found.plugin.config.interval_s == 5.0
    assert found.plugin.pages is list
    assert [r.name for r in found.plugin.collect()] == ["sound.level"]


def test_what_has_a_default_is_given_only_where_it_is_on_offer(install: Install) -> None:
    install(SOUND, {"collectors": {"sound": "Sound"}})
    (without,) = (a for a in admit(config(), "collectors", OFFERS) if a.name == "sound")
    (with_,) = (
        a for a in admit(config(), "collectors", {**OFFERS, "more": 8}) if a.name == "sound"
    )
    assert (without.plugin.more, with_.plugin.more) == (7, 8)


def test_built_in_plugins_come_through_the_same_door() -> None:
    found = collectors(config())
    assert {"host", "nvml", "progress"} <= found.keys()
    assert found["host"].state == "on"
    assert found["host"].source == "everstep"


BROKEN = {
    "raises at import": ("import no_such_module_anywhere\n", "ModuleNotFoundError"),
    "exits at import": ("import sys\nsys.exit('goodbye')\n", "SystemExit: goodbye"),
    "is not there": ("", "AttributeError"),
    "is no class": ("Bad = 3\n", "TypeError: .*Bad is not a class"),
    "has no config": ("class Bad:\n    def collect(self): return []\n", "has no `Config`"),
    "has a config of another kind": (
        "class Bad:\n    Config = dict\n    def collect(self): return []\n",
        "has no `Config` that is a msgspec.Struct",
    ),
    "has no verb": (
        "import msgspec\nclass Bad:\n    Config = msgspec.defstruct('Config', [])\n",
        r"has no collect\(\), which makes a collector",
    ),
    "asks for what nobody has": (
        SOUND.replace("pages, more=7", "moon").replace("= config, pages, more", "= 1, 2, 3"),
        "TypeError: asks for moon; on offer here: clock, pages",
    ),
    "raises in its constructor": (
        SOUND.replace("self.config, self.pages, self.more", "raise OSError('no sensor')  #"),
        "OSError: no sensor",
    ),
    "has no defaults": (
        SOUND.replace("interval_s: float = 3.0", "interval_s: float"),
        "defaults do not form a valid Config",
    ),
    "raises when asked whether it is supported": (
        SOUND.replace(
            "def collect", "def supported(self): raise OSError('eh')\n\n        def collect"
        ),
        "OSError: eh",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_failed_with_its_reason_and_the_others_go_on(
    install: Install, how: str
) -> None:
    code, why = BROKEN[how]
    name = "Sound" if "class Sound" in code else "Bad"
    install(code, {"collectors": {"broken": name}})
    install(SOUND, {"collectors": {"sound": "Sound"}})
    found = collectors(config())
    assert found["broken"].state == "failed"
    assert re.search(why, found["broken"].why), found["broken"].why
    assert found["broken"].plugin is None
    assert found["sound"].state == "on"


def test_a_plugin_that_hangs_in_its_constructor_is_left_behind(install: Install) -> None:
    install(
        SOUND.replace(
            "self.config, self.pages, self.more",
            "import builtins; builtins.everstep_test_gate.wait(60)  #",
        ),
        {"collectors": {"stuck": "Sound"}},
    )
    install(SOUND, {"collectors": {"sound": "Sound"}})
    gate = threading.Event()
    builtins.everstep_test_gate = gate  # type: ignore[attr-defined]  # only the plugin reads it
    try:
        found = collectors(config(), deadline_s=2.0)
    finally:
        gate.set()
        del builtins.everstep_test_gate  # type: ignore[attr-defined]  # set above
    assert found["stuck"].state == "failed"
    assert "did not come back within 2 s" in found["stuck"].why
    assert found["sound"].state == "on"


def test_a_plugin_that_has_nothing_to_look_at_says_so(install: Install) -> None:
    code = SOUND.replace(
        "def collect", "def supported(self): return 'no sensor here'\n\n        def collect"
    )
    install(code, {"collectors": {"sound": "Sound"}})
    found = collectors(config())["sound"]
    assert (found.state, found.why) == ("unsupported", "no sensor here")
    assert found.plugin is not None


def test_a_plugin_that_is_turned_off_is_not_even_imported(install: Install) -> None:
    install("import sys\nsys.exit('never')\n", {"collectors": {"sound": "Sound"}})
    found = collectors(config(sound={"enabled": False, "anything": 1}))["sound"]
    assert (found.state, found.why) == ("off", "enabled = false")


def test_a_plugin_that_is_turned_on_in_words_is_on(install: Install) -> None:
    install(SOUND, {"collectors": {"sound": "Sound"}})
    assert collectors(config(sound={"enabled": True}))["sound"].state == "on"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"interval_s": "x"}, ["[collectors.sound]", "interval_s", "Expected `float`"]),
        ({"interval": 1}, ["[collectors.sound]", "'interval'", "did you mean 'interval_s'?"]),
        ({"enabled": "no"}, ["[collectors.sound]", "key 'enabled'", "Expected `bool`"]),
        (7, ["[collectors.sound] must be a table, not 7"]),
    ],
)
def test_a_wrong_table_is_an_error_for_the_person_who_wrote_it(
    install: Install, table: object, told: list[str]
) -> None:
    install(SOUND, {"collectors": {"sound": "Sound"}})
    with pytest.raises(ConfigError) as caught:
        collectors(config(sound=table))
    for part in ["everstep.toml", *told]:
        assert part in str(caught.value)


def test_a_table_for_a_plugin_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown collector plugin 'hots'.*did you mean 'host'"):
        check(config(hots={}), "collectors")


def test_nobody_takes_the_name_of_a_built_in_plugin(install: Install) -> None:
    dist = install(SOUND, {"collectors": {"host": "Sound"}}, dist="aaa")
    both = [a for a in admit(config(), "collectors", OFFERS) if a.name == "host"]
    assert [(a.source, a.state) for a in both] == [("everstep", "on"), (dist, "failed")]
    assert "the name is taken by the plugin of everstep" in both[1].why
    assert installed("collectors")["host"].module == "everstep.plugins.collectors.host"


def test_listing_what_is_installed_imports_nothing() -> None:
    code = (
        "import sys; from everstep.sdk.door import KINDS, installed\n"
        "assert all(installed(k) for k in KINDS)\n"
        "print([m for m in sys.modules if m.startswith('everstep.plugins') or m == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    assert len(KINDS) == 5
