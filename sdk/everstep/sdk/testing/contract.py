"""Runs the rules, the fundamental ones first, and says everything that is broken at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from everstep.sdk.testing import behaviour, papers
from everstep.sdk.testing.subject import Subject, subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.metadata import EntryPoint
    from pathlib import Path

    from everstep.sdk.door import Kind
    from everstep.wire.messages import Reading

# A rule of a later group is looked at only when all rules of the groups before it hold.
_GROUPS: tuple[tuple[Callable[[Subject], Iterator[str]], ...], ...] = (
    (papers.config_is_a_frozen_struct,),
    (papers.config_has_sound_defaults,),
    (
        papers.config_leaves_enabled_to_the_door,
        papers.collector_says_how_often,
        papers.readme_has_the_headings,
        papers.sample_equals_the_defaults,
        papers.sample_explains_every_option,
        behaviour.verb_takes_what_it_is_given,
        behaviour.hook_knows_its_moments,
        behaviour.can_be_made,
    ),
    (
        behaviour.collector_returns_sound_readings,
        behaviour.detector_is_a_pure_function,
        behaviour.state_survives_a_restart,
    ),
)


class ContractError(AssertionError):
    """A plugin breaks the contract; the text lists every rule that is broken."""


class Options(TypedDict, total=False):
    """What the suite cannot know by itself."""

    kind: Kind
    """For a class that could be of several kinds."""
    folder: Path
    """Where README.md and sample.toml are; default: beside the class's module."""
    offers: Mapping[str, object]
    """What the constructor asks for, beyond stand-ins for what the daemons offer."""
    readings: Sequence[Reading]
    """What a detector is fed with, besides oddities."""
    complete: bool
    """The hardware is here, or a stand-in: every documented metric must be returned."""
    deadline_s: float
    """For one call; default: a collector's own interval (10 s at most), a second for a detector."""


def check_contract(plugin: type | EntryPoint, **options: Unpack[Options]) -> None:
    """Raise ContractError, which lists every broken rule, unless the plugin keeps them all."""
    if broken := broken_rules(plugin, **options):
        name = plugin.__name__ if isinstance(plugin, type) else plugin.name
        listed = "\n".join(f"  - {rule}" for rule in broken)
        raise ContractError(f"{name} breaks the plugin contract:\n{listed}")


def broken_rules(plugin: type | EntryPoint, **options: Unpack[Options]) -> list[str]:
    """Return what is wrong with a plugin, given as its class or its entry point; [] for nothing."""
    try:
        found = subject(
            plugin,
            kind=options.get("kind"),
            folder=options.get("folder"),
            offers=options.get("offers", {}),
        )
    except Exception as exc:  # noqa: BLE001  importing a stranger's plugin may raise anything
        return [f"{type(exc).__name__}: {exc}"]
    found = replace(
        found,
        readings=options.get("readings", ()),
        complete=options.get("complete", False),
        deadline_s=options.get("deadline_s"),
    )
    for group in _GROUPS:
        if broken := [said for rule in group for said in rule(found)]:
            return broken
    return []
