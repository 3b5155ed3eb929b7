"""Where a job's time went, as `everstep jobs show` draws it."""

from __future__ import annotations

from typing import Any

from everstep.cli import show

_BAR = 30


def describe(time: dict[str, Any]) -> None:
    """Print the account of a job's time, its ratios and its last recoveries."""
    wall_s = time["wall_s"]
    if wall_s <= 0:
        return
    show.heading("where its time went")
    show.table(("KIND", "TIME", "SHARE", ""), rows(time))
    show.pairs(
        [
            ("wall", show.duration(wall_s)),
            ("goodput", share(time["goodput"])),
            ("ETTR", share(time["ettr"])),
            ("MTTR", "" if time["mttr_s"] is None else show.duration(time["mttr_s"])),
        ]
    )
    if time["recoveries"]:
        show.heading("recoveries")
        show.table(
            ("INCIDENT", "BEGAN", "TOOK", "DECISION", "STEPS LOST", "PHASES"),
            [_recovery(r) for r in time["recoveries"]],
        )


def rows(time: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the kinds that took any time, the longest first."""
    wall_s = time["wall_s"]
    kinds = sorted(time["kinds"].items(), key=lambda kind: -kind[1])
    return [
        (words(name), show.duration(s), share(s / wall_s), "#" * round(_BAR * s / wall_s))
        for name, s in kinds
        if s > 0
    ]


def words(kind: str) -> str:
    """Return a kind as a person reads it."""
    return kind.replace("_", " ")


def share(ratio: float | None) -> str:
    """Return a ratio in per cent.

    >>> share(0.98765), share(None)
    ('98.8 %', '-')
    """
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _recovery(recovery: dict[str, Any]) -> tuple[str, ...]:
    steps = recovery["steps_lost"]
    return (
        str(recovery["incident"]),
        show.moment(recovery["began_at_s"]),
        show.duration(recovery["took_s"]),
        recovery["decision"],
        "-" if steps is None else str(steps),
        ", ".join(f"{words(p['phase'])} {show.duration(p['s'])}" for p in recovery["phases"]),
    )
