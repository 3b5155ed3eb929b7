"""Actions and notifiers: told everything, able to hurt nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
from tests.coordinator.fake_agent import until
from tests.coordinator.world import World

from everstep.coordinator.announcing import Announcers
from everstep.coordinator.facts import PluginFailed
from everstep.coordinator.turn import Tell
from everstep.sdk.door import Admitted, Kind


class Config(msgspec.Struct, frozen=True):
    """No options."""


class Plugin:
    """An action and a notifier that remembers, raises or hangs."""

    def __init__(self, *, raises: bool = False, gate: threading.Event | None = None) -> None:
        self.told: list[Mapping[str, object]] = []
        self._raises = raises
        self._gate = gate

    def act(self, what: Mapping[str, object]) -> None:
        if self._gate is not None:
            self._gate.wait(30)
        if self._raises:
            raise RuntimeError("the pager is on fire")
        self.told.append(what)

    notify = act


def admitted(plugin: Any, kind: Kind = "actions", name: str = "one") -> Admitted:
    return Admitted(kind, name, "test", "on", "", plugin, Config())


async def test_plugins_hear_what_is_for_their_kind_in_order() -> None:
    action, notifier = Plugin(), Plugin()
    all_of_them = [admitted(action), admitted(notifier, "notifiers")]
    announcers = Announcers(all_of_them, lambda _: None, lambda: 0.0)
    for i in range(3):
        announcers.tell(Tell("actions", {"incident": i}))
    announcers.tell(Tell("notifiers", {"id": 9}))
    await until(lambda: len(action.told) == 3 and len(notifier.told) == 1)
    assert [t["incident"] for t in action.told] == [0, 1, 2]
    await announcers.close()


async def test_one_that_raises_is_put_down_and_the_others_go_on() -> None:
    failed: list[PluginFailed] = []
    good = Plugin()
    all_of_them = [admitted(Plugin(raises=True), name="bad"), admitted(good, name="good")]
    announcers = Announcers(all_of_them, failed.append, lambda: 5.0)
    announcers.tell(Tell("actions", {"incident": 7}))
    await until(lambda: good.told and failed)
    assert (failed[0].plugin, failed[0].incident) == ("actions.bad", 7)
    assert "on fire" in failed[0].why
    states = {p["name"]: p["why"] for p in announcers.listing()}
    assert "on fire" in str(states["bad"])
    assert states["good"] == ""
    await announcers.close()


async def test_one_that_hangs_holds_up_nobody_and_hears_the_rest_later() -> None:
    gate = threading.Event()
    slow, good = Plugin(gate=gate), Plugin()
    announcers = Announcers(
        [admitted(slow, name="slow"), admitted(good, name="good")], lambda _: None, lambda: 0.0
    )
    for i in range(1100):
        announcers.tell(Tell("actions", {"incident": i}))
        await asyncio.sleep(0)
    await until(lambda: len(good.told) > 5)
    assert not slow.told
    gate.set()
    await until(lambda: slow.told)
    await announcers.close()
    assert announcers.running[0].dropped > 0, "bounded: the oldest are dropped and counted"


def test_every_decision_and_every_incident_is_told() -> None:
    world = World(["a", "b", "c"])
    world.launch_all(["a", "b", "c"], nnodes=(2, 2))
    world.until(world.training)
    world.run(3)
    world.kill_node("a")
    world.until(world.training)
    world.run(3)
    actions = [t.what for t in world.told if t.kind == "actions"]
    assert {"evict", "none"} >= {a["what"] for a in actions}
    evict = next(a for a in actions if a["what"] == "evict")
    assert (evict["node"], evict["status"]) == ("a", "done")
    incidents = [t.what for t in world.told if t.kind == "notifiers" and t.what["job"]]
    assert [bool(i["closed_at_s"]) for i in incidents] == [False, True], "opened, then closed"
