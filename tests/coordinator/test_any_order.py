"""Faults in any order, in virtual time: what must hold always, and that it ends well."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordinator.world import FakeLauncher, World

from everstep.coordinator.books import replay
from everstep.coordinator.config import BudgetConfig, CoordinatorConfig
from everstep.coordinator.facts import GenerationProposed, NodeMoved, PlanCommitted

NAMES = ["a", "b", "c", "d"]
NNODES = (2, 3)
GENEROUS = CoordinatorConfig(
    budget=BudgetConfig(same_cause=50, mixed=50, same_rank_killed=500, outside=500)
)


class Chaos:
    """Does one thing after another to a world; what was killed comes back sooner or later."""

    def __init__(self, world: World) -> None:
        self.world = world

    def act(self, what: str, number: int) -> None:
        actions: dict[str, Callable[[str, int], None]] = {
            "run": lambda _, n: self.world.run(0.25 * (n + 1)),
            "run long": lambda _, n: self.world.run(5 * (n + 1)),
            "kill rank": self._kill_rank,
            "kill launcher": self._kill_launcher,
            "launch": self._launch,
            "kill agent": self._kill_agent,
            "start agent": self._start_agent,
            "kill node": self._kill_node,
            "freeze": lambda name, _: self.world.freeze(name),
            "thaw": self._thaw,
            "cut": lambda name, _: setattr(self.world.nodes[name], "cut", True),
            "mend": lambda name, _: setattr(self.world.nodes[name], "cut", False),
            "reset": lambda name, _: self.world.break_connection(name),
            "crash": self._crash,
            "crash soon": lambda _, n: setattr(self.world, "crash_in", n),
            "start coordinator": self._start_coordinator,
        }
        actions[what](NAMES[number % len(NAMES)], number)

    def heal(self) -> None:
        """Bring everything back."""
        world = self.world
        world.crash_in = None
        self._start_coordinator("", 0)
        for name in NAMES:
            self._thaw(name, 0)
            self._start_agent(name, 0)
            world.nodes[name].cut = False
            world.break_connection(name)
        world.run(5)
        for name in NAMES:
            self._launch(name, 0)
            book = world.cluster.books.nodes[name]
            if book.state in ("evicted", "broken"):
                operator = world.operator()
                operator.readmit(name, "healed")
                world.ask(operator)

    def _kill_rank(self, _: str, number: int) -> None:
        book = self.world.job()
        group = self.world.group(book.id, book.generation)
        if group:
            self.world.kill_rank(group[number % len(group)][1].rank)

    def _kill_launcher(self, name: str, _: int) -> None:
        launchers = self.world.nodes[name].launchers
        if launchers and not self.world.nodes[name].frozen:
            self.world.kill_launcher(launchers[0])

    def _launch(self, name: str, _: int) -> None:
        node = self.world.nodes[name]
        node.launchers[:] = [la for la in node.launchers if not (la.over or la.refused)]
        if not node.launchers and node.agent and not node.frozen:
            self.world.launch(name, nnodes=NNODES)

    def _kill_agent(self, name: str, _: int) -> None:
        if self.world.nodes[name].agent and not self.world.nodes[name].frozen:
            self.world.kill_agent(name)

    def _start_agent(self, name: str, _: int) -> None:
        if not self.world.nodes[name].agent and self.world.up:
            self.world.start_agent(name)

    def _kill_node(self, name: str, _: int) -> None:
        if not self.world.nodes[name].frozen:
            self.world.kill_node(name)

    def _thaw(self, name: str, _: int) -> None:
        if self.world.nodes[name].frozen:
            self.world.thaw(name)

    def _crash(self, _: str, __: int) -> None:
        if self.world.up:
            self.world.kill_coordinator()

    def _start_coordinator(self, _: str, __: int) -> None:
        if not self.world.up:
            self.world.start_coordinator()


def check(world: World, seen: set[int]) -> None:
    """What must hold at every moment."""
    evicted: set[str] = set()
    numbers: set[int] = set()
    for fact in world.journal:
        match fact:
            case NodeMoved(node=name, state=state):
                (evicted.add if state in ("evicted", "broken") else evicted.discard)(name)
            case PlanCommitted(plan=plan):
                members = [m.node for m in plan.members]
                assert plan.generation not in numbers, "two plans of one generation"
                numbers.add(plan.generation)
                assert len(set(members)) == len(members)
                assert NNODES[0] <= len(members) <= NNODES[1]
                assert not evicted & set(members), "an evicted node is a member"
            case _:
                pass
    proposed = [f.generation for f in world.facts(GenerationProposed)]
    assert proposed == sorted(set(proposed)), "a number was given out twice"
    seen |= numbers
    for node in world.nodes.values():
        for launcher in node.launchers:
            _check_launcher(launcher, numbers)


def _check_launcher(launcher: FakeLauncher, committed: set[int]) -> None:
    told = [p.generation for p in launcher.plans]
    assert told == sorted(set(told))
    assert set(told) <= committed, "told a plan that is not in the journal"


ACTIONS = st.sampled_from(
    ["run", "run", "run long", "kill rank", "kill launcher", "launch", "launch", "kill agent",
     "start agent", "start agent", "kill node", "freeze", "thaw", "cut", "mend", "reset", "crash",
     "crash soon", "start coordinator", "start coordinator"]
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=30))
def test_whatever_happens_the_plans_stay_sound_and_the_job_goes_on(
    actions: list[tuple[str, int]],
) -> None:
    world = World(NAMES, config=GENEROUS)
    world.snapshot_every = 4
    world.greet_after_s = 1.0
    world.launch_all(NAMES, nnodes=NNODES)
    world.until(world.training)
    chaos, seen = Chaos(world), set[int]()
    for what, number in actions:
        chaos.act(what, number)
        check(world, seen)
        if world.up:
            assert replay(list(world.journal)) == world.cluster.books
    chaos.heal()
    world.until(world.training, within=60)
    check(world, seen)
    world.run(30)
    assert world.training()
