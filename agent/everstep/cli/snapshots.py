"""`everstep snapshots`: what a run has saved; is it good, what may go, out with the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli import show
from everstep.cli.errors import VerbError, WrongRequestError
from everstep.cli.options import Json
from everstep.cli.verbs import application

if TYPE_CHECKING:
    from everstep.snapshots.catalogue import Entry
    from everstep.snapshots.marker import Marker
    from everstep.snapshots.places import Place

snapshots = application()

DAMAGED = 1

Where = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="The run's folder or its snapshots, or a URL such as s3://bucket/run."
    ),
]
Id = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="A snapshot's id such as s000120-g7.")
]
Fact = dict[str, Any]


@snapshots.command("list")
def _list(where: Where, *, json: Json = False) -> None:
    """List a run's snapshots, oldest first.

    STATE is good (complete, and every file of the right size), unfinished, damaged or suspect (it
    did not load, or the run failed at once after it). `verify` looks at every byte. The one that
    `latest` names has a star. With --json: a list of objects with id, step, generation, job,
    committed_at_s, bytes, parts, world_size, final, state, why and latest.

    Examples:
        everstep snapshots list runs/mine
        everstep snapshots list s3://bucket/run/snapshots --json

    Exit codes:
        0   listed, whatever their state
        64  wrong arguments, or nothing there
        69  the place cannot be read
    """
    with _reading(where) as place:
        facts = _facts(place)
    if json:
        show.as_json(facts)
        return
    heads = ("ID", "STEP", "GEN", "COMMITTED", "SIZE", "PARTS", "STATE", "WHY")
    show.table(heads, [_row(one) for one in facts])


@snapshots.command("verify")
def _verify(
    where: Where,
    id_: Id = None,
    *,
    threads: Annotated[int, typer.Option(min=1, help="How many files are read at once.")] = 8,
    json: Json = False,
) -> None:
    """Read every byte of a snapshot, or of all complete ones, and compare the checksums.

    With --json: a list of objects with id, good, bytes and damages.

    Examples:
        everstep snapshots verify runs/mine
        everstep snapshots verify runs/mine s000120-g7

    Exit codes:
        0   everything is as it was written
        1   something is damaged, or what was named is unfinished
        64  wrong arguments, or nothing there
        69  the place cannot be read
    """
    with _reading(where) as place:
        ids = [_known(place, id_)] if id_ else [str(e.id) for e in _complete(place)]
        facts = [_verified(place, one, threads) for one in ids]
    if json:
        show.as_json(facts)
    else:
        for fact in facts:
            print(f"{fact['id']}  {'good' if fact['good'] else '; '.join(fact['damages'])}")
    if not all(fact["good"] for fact in facts):
        raise typer.Exit(DAMAGED)


@snapshots.command("prune")
def _prune(
    where: Where,
    *,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest stay.")],
    keep_every: Annotated[
        int, typer.Option(min=0, help="Those of every such step stay too; 0: none.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete old snapshots, by the rules that a job follows after each save.

    The newest good one always stays, whatever is asked for. Those of earlier jobs in the same
    place go when the newest job has as many good ones as stay; so do unfinished ones of earlier
    generations. One that a job may be writing now stays.

    Examples:
        everstep snapshots prune runs/mine --keep 2 --dry-run
        everstep snapshots prune runs/mine --keep 2 --keep-every 1000 --yes

    Exit codes:
        0   deleted, or nothing to delete
        64  wrong arguments, nothing there, or not confirmed
        69  the place cannot be read, or something cannot be deleted
    """
    from everstep.snapshots import catalogue
    from everstep.snapshots.orders import Policy

    with _reading(where) as place:
        gone = catalogue.prunable(place, Policy(keep=keep, keep_every_steps=keep_every))
        for name in gone:
            print(f"{'would delete' if dry_run else 'delete'} {place.where}/{name}")
        if not gone:
            print("nothing to delete")
        if dry_run or not gone:
            return
        if not yes:
            _confirm(len(gone))
        for name in gone:
            place.remove(name)


@snapshots.command("export")
def _export(
    where: Where,
    id_: Id = None,
    *,
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to: a name that ends in .safetensors.")
    ],
    only: Annotated[
        str, typer.Option(metavar="NAME", help="Which object of the run's state.")
    ] = "model",
    all_: Annotated[
        bool, typer.Option("--all", help="Every tensor there is, under its full name.")
    ] = False,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Most GB a file; more tensors make more files.")
    ] = 5.0,
) -> None:
    """Write the model of a snapshot, by default the latest, as safetensors.

    Every byte is verified first. Any number of parts and shards becomes whole tensors again. With
    several files there is an index, FILE.index.json, as Hugging Face's tools read it.

    Examples:
        everstep snapshots export runs/mine --to model.safetensors
        everstep snapshots export runs/mine s000120-g7 --all --to everything.safetensors

    Exit codes:
        0   written
        1   the snapshot is damaged or unfinished
        64  wrong arguments, nothing there, or no such tensors
        69  the place cannot be read, or the file not be written
    """
    if to.suffix != ".safetensors":
        raise WrongRequestError(f"--to {to}: the name must end in .safetensors")
    with _reading(where) as place:
        from everstep.snapshots import dcp, export

        name = _known(place, id_) if id_ else _newest(place)
        fact = _verified(place, name, threads=8)
        if not fact["good"]:
            raise _DamagedError(f"{place.where}/{name}: {'; '.join(fact['damages'])}")
        names = export.chosen(dcp.tensors(place, name), prefix="" if all_ else only)
        files = export.split(names, most_bytes=int(shard_gb * 1e9))
        about = {"format": "pt", "everstep_snapshot": name}
        for path in export.write(place, name, files, to, about):
            print(path)


# ---------------------------------------------------------------------------------------


class _DamagedError(VerbError):
    exit_code = DAMAGED


@contextmanager
def _reading(where: str) -> Iterator[Place]:
    """Give the place that PATH means; errors of the disk or store become one line."""
    try:
        from everstep.snapshots.sealed import SnapshotError
    except ImportError as exc:
        raise VerbError(
            f"snapshots need the package {exc.name}: pip install 'everstep[trainer]'"
        ) from exc
    try:
        yield _opened(where)
    except SnapshotError as exc:
        raise WrongRequestError(str(exc)) from exc
    except ImportError as exc:
        raise VerbError(f"{exc}: pip install 'everstep[trainer]'") from exc
    except OSError as exc:
        raise VerbError(f"{exc.filename or where}: {exc.strerror or exc}") from exc
    except Exception as exc:
        # A store's library has errors of its own, e.g. for credentials that are missing.
        if "://" not in where or isinstance(exc, (VerbError, typer.Exit)):
            raise
        raise VerbError(f"{where}: {type(exc).__name__}: {exc}") from exc


def _opened(where: str) -> Place:
    from everstep.snapshots.places import open_place

    place = open_place(where)
    if "snapshots" in place.names():
        place = open_place(f"{where.rstrip('/')}/snapshots")
    if not place.names():
        raise WrongRequestError(f"{where}: there are no snapshots")
    return place


def _entries(place: Place) -> list[Entry]:
    from everstep.snapshots import catalogue

    return sorted(catalogue.entries(place), key=lambda e: (e.committed_at_s or 1e12, e.place))


def _complete(place: Place) -> list[Entry]:
    return [e for e in _entries(place) if e.committed]


def _known(place: Place, id_: str) -> str:
    ids = [str(e.id) for e in _entries(place)]
    if id_ not in ids:
        raise WrongRequestError(f"{place.where} has no {id_}; there are {', '.join(ids) or 'none'}")
    return id_


def _newest(place: Place) -> str:
    named = place.latest()
    good = [str(e.id) for e in _complete(place) if e.job is not None and not e.suspect]
    if not good:
        raise WrongRequestError(f"{place.where} has no complete snapshot")
    return named if named in good else good[-1]


def _facts(place: Place) -> list[Fact]:
    latest = place.latest()
    return [{**_fact(place, e), "latest": str(e.id) == latest} for e in _entries(place)]


def _fact(place: Place, entry: Entry) -> Fact:
    from everstep.snapshots.sealed import SnapshotError
    from everstep.snapshots.verify import quick_look, read_marker

    facts: Fact = {"id": str(entry.id), "step": entry.id.step, "generation": entry.id.generation}
    if not entry.committed:
        return _judged(facts, None, "unfinished", "")
    try:
        found = read_marker(place, str(entry.id))
    except SnapshotError as exc:
        return _judged(facts, None, "damaged", str(exc))
    wrong = quick_look(place, str(entry.id), found)
    state = "damaged" if wrong else "suspect" if entry.suspect else "good"
    return _judged(facts, found, state, "; ".join(wrong))


def _judged(facts: Fact, found: Marker | None, state: str, why: str) -> Fact:
    return {
        **facts,
        "job": found.job if found else None,
        "committed_at_s": found.committed_at_s if found else None,
        "bytes": found.bytes if found else None,
        "parts": len(found.parts or [n for n in found.files if n != ".metadata"])
        if found
        else None,
        "world_size": found.world_size if found else None,
        "final": found.final if found else False,
        "state": state,
        "why": why,
    }


def _row(fact: Fact) -> list[show.Cell]:
    from everstep.snapshots.writer.write import size_text

    at_s = fact["committed_at_s"]
    return [
        f"{fact['id']} *" if fact["latest"] else fact["id"],
        str(fact["step"]),
        str(fact["generation"]),
        "-" if at_s is None else show.moment(at_s),
        "-" if fact["bytes"] is None else size_text(fact["bytes"]),
        "-" if fact["parts"] is None else str(fact["parts"]),
        show.state(fact["state"]),
        fact["why"],
    ]


def _verified(place: Place, id_: str, threads: int) -> Fact:
    from everstep.snapshots.sealed import SnapshotError
    from everstep.snapshots.verify import damages, read_marker

    try:
        found = read_marker(place, id_)
    except SnapshotError as exc:
        return {"id": id_, "good": False, "bytes": 0, "damages": [str(exc)]}
    wrong = damages(place, id_, found, threads=threads)
    return {"id": id_, "good": not wrong, "bytes": found.bytes, "damages": wrong}


def _confirm(count: int) -> None:
    if not sys.stdin.isatty():
        raise WrongRequestError("nothing was deleted: say --yes where nobody can be asked")
    if not typer.confirm(f"Delete {count}?"):
        raise WrongRequestError("nothing was deleted")
