"""`everstep snapshots`: list, verify, prune and export, and what they say when it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cli.actors import Ended
from tests.snapshots.ranks import contents, order
from tests.snapshots.test_export import plain, read

from everstep.snapshots import catalogue
from everstep.snapshots.faults import Faults
from everstep.snapshots.places import Folder
from everstep.snapshots.writer.commit import Commit
from everstep.snapshots.writer.write import write_part

Everstep = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with five snapshots of 300 kB, the last two of a second generation."""
    for step, generation in ((10, 1), (20, 1), (30, 1), (25, 2), (35, 2)):
        save(tmp_path / "run" / "snapshots", step, generation)
    return tmp_path / "run"


def save(place: Path, step: int, generation: int, *, job: str = "j") -> None:
    one = order(place, step, generation=generation, job=job)
    folder = Folder(place)
    write_part(one, memoryview(contents(0, step)), folder, faults=Faults())
    commit = Commit(one, b"m", folder, faults=Faults(), pause=lambda _: None, give_up=lambda: None)
    commit.run()


def ids(run: Path) -> list[str]:
    return [str(e.id) for e in catalogue.entries(run / "snapshots")]


def test_the_list_tells_what_is_there_and_in_which_state(everstep: Everstep, run: Path) -> None:
    place = run / "snapshots"
    (place / "s000040-g2").mkdir()
    (place / "s000010-g1" / "__0_0.distcp").write_bytes(b"short")
    (place / "s000020-g1" / catalogue.SUSPECT).touch()
    (place / "s000030-g1" / "COMMIT.json").write_text("{}")
    told = everstep("snapshots", "list", run, "--json")
    assert told.code == 0
    facts = {f["id"]: f for f in json.loads(told.out)}
    assert {id_: f["state"] for id_, f in facts.items()} == {
        "s000010-g1": "damaged",
        "s000020-g1": "suspect",
        "s000030-g1": "damaged",
        "s000025-g2": "good",
        "s000035-g2": "good",
        "s000040-g2": "unfinished",
    }
    assert [id_ for id_, f in facts.items() if f["latest"]] == ["s000035-g2"]
    good = facts["s000035-g2"]
    assert (good["step"], good["generation"], good["parts"], good["bytes"]) == (35, 2, 1, 300_001)
    assert "5 bytes, 300000 were written" in facts["s000010-g1"]["why"]

    text = everstep("snapshots", "list", place)
    assert text.code == 0
    assert "s000035-g2 *" in text.out
    assert "300.0 kB" in text.out


def test_verify_reads_every_byte(everstep: Everstep, run: Path) -> None:
    whole = everstep("snapshots", "verify", run)
    assert (whole.code, whole.out.count("good")) == (0, 5)
    file = run / "snapshots" / "s000020-g1" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[123_456] ^= 4
    file.write_bytes(data)
    assert "damaged" not in everstep("snapshots", "list", run).out, "its size is right"
    told = everstep("snapshots", "verify", run, "--json")
    assert told.code == 1
    bad = [f for f in json.loads(told.out) if not f["good"]]
    assert [(f["id"], f["damages"]) for f in bad] == [
        ("s000020-g1", ["__0_0.distcp is damaged: its checksum does not fit"])
    ]
    assert everstep("snapshots", "verify", run, "s000010-g1").code == 0
    assert everstep("snapshots", "verify", run, "s000020-g1").code == 1
    missing = everstep("snapshots", "verify", run, "s000099-g1")
    assert missing.code == 64
    assert "there are s000010-g1" in missing.err


def test_prune_says_what_it_would_do_and_asks(everstep: Everstep, run: Path) -> None:
    before = ids(run)
    told = everstep("snapshots", "prune", run, "--keep", 2, "--dry-run")
    assert (told.code, told.out.count("would delete")) == (0, 3)
    refused = everstep("snapshots", "prune", run, "--keep", 2)
    assert refused.code == 64
    assert "--yes" in refused.err
    assert ids(run) == before
    assert everstep("snapshots", "prune", run, "--keep", 1, "--keep-every", 10, "--yes").code == 0
    assert ids(run) == ["s000010-g1", "s000020-g1", "s000030-g1", "s000035-g2"]
    again = everstep("snapshots", "prune", run, "--keep", 9, "--yes")
    assert (again.code, again.out) == (0, "nothing to delete\n")


def test_prune_never_takes_the_last_good_one(everstep: Everstep, run: Path) -> None:
    for suspect in ("s000025-g2", "s000035-g2"):
        (run / "snapshots" / suspect / catalogue.SUSPECT).touch()
    assert everstep("snapshots", "prune", run, "--keep", 1, "--yes").code == 0
    assert ids(run) == ["s000030-g1", "s000035-g2"]


def test_export_writes_the_latest_model(everstep: Everstep, tmp_path: Path) -> None:
    model = {"model.a": torch.randn(4, 4), "optimizer.m": torch.ones(2)}
    plain(tmp_path / "snapshots", model, 1)
    to = tmp_path / "m.safetensors"
    told = everstep("snapshots", "export", tmp_path, "--to", to)
    assert (told.code, told.out) == (0, f"{to}\n"), told.err
    assert torch.equal(read(to)["a"], model["model.a"])
    assert everstep("snapshots", "export", tmp_path, "s000001-g1", "--all", "--to", to).code == 0
    assert set(read(to)) == set(model)


def test_export_of_what_is_damaged_writes_nothing(everstep: Everstep, tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3)}, 1)
    file = tmp_path / "s000001-g1" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    told = everstep("snapshots", "export", tmp_path, "--to", tmp_path / "m.safetensors")
    assert told.code == 1
    assert "__0_0.distcp is damaged" in told.err
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["list", "NOWHERE"], 64, "there are no snapshots"),
        (["verify", "NOWHERE"], 64, "there are no snapshots"),
        (["prune", "NOWHERE", "--keep", "1", "--yes"], 64, "there are no snapshots"),
        (["prune", "NOWHERE", "--keep", "0"], 64, "keep"),
        (["export", "NOWHERE", "--to", "m.bin"], 64, ".safetensors"),
        (["list", "s3://bucket/run"], 64, "s3fs"),
        (["list", "nonsense://x"], 64, "nonsense"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    words: list[str], code: int, says: str, everstep: Everstep, tmp_path: Path
) -> None:
    told = everstep("snapshots", *(str(tmp_path / "no") if w == "NOWHERE" else w for w in words))
    assert told.code == code
    assert says in told.err
    assert told.err.count("\n") == 1
