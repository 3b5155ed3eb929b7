"""A writer puts down what ranks order: durable, marked last, and without them when need be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.snapshots.conftest import StartWriter
from tests.snapshots.ranks import DEADLINE_S, MakeRank, contents, memory, order

from everstep.snapshots import marker
from everstep.snapshots.client import WriterLink
from everstep.snapshots.orders import Attach, PartDone, Refused
from everstep.snapshots.writer import Writer
from everstep.snapshots.writer.child import END
from everstep.wire.codec import frame


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def test_a_save_of_one_rank_is_complete_marked_and_the_latest(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    done = make_rank().save(place, 10)

    assert done.why is None
    found = marker.verify(place / "s000010-g1")
    assert found == done.marker
    assert (place / "s000010-g1" / "__0_0.distcp").read_bytes() == contents(0, 10)
    assert (place / "s000010-g1" / ".metadata").read_bytes() == b"planned"
    assert set(found.files) == {"__0_0.distcp", ".metadata"}
    assert [(p.rank, p.file, p.bytes) for p in found.parts] == [(0, "__0_0.distcp", 300_000)]
    assert found.committed_at_s >= found.parts[0].written_at_s > 0
    assert (place / "latest").readlink() == Path("s000010-g1"), "relative: a copy stays right"


def test_the_lead_waits_for_the_parts_of_all_nodes(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    ranks = [make_rank(r) for r in range(3)]
    for rank in ranks[:2]:
        rank.order(place, 10, parts=3)
        assert rank.part().why is None
    assert not (place / "s000010-g1" / marker.NAME).exists()
    ranks[2].order(place, 10, parts=3)
    assert ranks[0].done().why is None
    assert len(marker.verify(place / "s000010-g1").parts) == 3


def test_a_rank_without_a_part_spares_the_lead_the_wait(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead, other = make_rank(0), make_rank(1)
    lead.order(place, 10, parts=2)
    assert lead.part().why is None
    nothing = order(place, 10, rank=1, parts=2, data=b"")
    other.link.write(msgspec.structs.replace(nothing, slot=-1, missing="model.a changed"))
    assert other.part().why == "model.a changed"
    assert lead.done().why == "rank 1: model.a changed"
    assert not (place / "s000010-g1").exists()


def test_a_range_of_any_length_and_start_is_written_as_it_is(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    rank = make_rank()
    whole = contents(7, 7, 3_000_001)
    rank.attach(whole)
    for step, (start, size) in enumerate([(0, 1), (1, 5000), (4096, 8192), (0, 3_000_001)], 1):
        rank.link.write(order(place, step, data=whole[start : start + size], start=start))
        assert rank.part().why is None
        assert rank.done().why is None
        written = place / f"s{step:06d}-g1" / "__0_0.distcp"
        assert written.read_bytes() == whole[start : start + size]


def test_a_rank_that_dies_after_its_order_leaves_a_complete_snapshot(
    start_writer: StartWriter, place: Path
) -> None:
    writer = start_writer("before-open:sleep=0.5")
    code = (
        "import sys, os, pathlib\n"
        "from tests.snapshots.ranks import Rank\n"
        "rank = Rank(pathlib.Path(sys.argv[1]))\n"
        "rank.order(sys.argv[2], 10)\n"
        "rank.close()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[2]
    died = subprocess.run(
        [sys.executable, "-c", code, writer.path, place], check=False, cwd=root, timeout=60
    )
    assert died.returncode == -signal.SIGKILL
    assert writer.close(DEADLINE_S), "it finishes what it was ordered"
    assert marker.verify(place / "s000010-g1").step == 10


def test_when_its_launcher_dies_it_finishes_and_ends(short: Path, place: Path) -> None:
    code = (
        "import sys, os, pathlib\n"
        "from everstep.snapshots.writer import start\n"
        "from tests.snapshots.ranks import Rank\n"
        "environ = {**os.environ, 'EVERSTEP_FAULT': 'before-open:sleep=0.5'}\n"
        "writer = start(pathlib.Path(sys.argv[1]), environ=environ)\n"
        "print(writer.pid, flush=True)\n"
        "rank = Rank(writer.path)\n"
        "rank.order(sys.argv[2], 10)\n"
        "rank.close()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, short, place], stdout=subprocess.PIPE, cwd=root
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        gone = os.pidfd_open(pid)
        wait_for(gone)
        os.close(gone)
    assert marker.verify(place / "s000010-g1").step == 10


def wait_for(pidfd: int) -> None:
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(DEADLINE_S * 1000), "the process does not end"


def test_many_saves_leave_nothing_behind_in_the_writer(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    rank = make_rank()
    held = []
    for step in range(1, 31):
        assert rank.save(place, step, slot=step % 2).why is None
        if step in (10, 30):
            # The thread of a save ends just after its answer.
            deadline(lambda: len(list(Path(f"/proc/{writer.pid}/task").iterdir())) == 1)
            maps = Path(f"/proc/{writer.pid}/maps").read_text().count("memfd:slot")
            held.append((len(list(Path(f"/proc/{writer.pid}/fd").iterdir())), maps))
    assert held[0] == held[1]


def test_a_store_is_reached_from_the_writer_too(
    start_writer: StartWriter, make_rank: MakeRank
) -> None:
    start_writer()
    done = make_rank().save("memory://run", 1)
    assert done.why is None
    assert done.marker is not None
    assert [p.rank for p in done.marker.parts] == [0]


def test_it_starts_without_heavy_modules() -> None:
    code = (
        "import sys\n"
        "import everstep.snapshots.writer.server\n"
        "heavy = {'torch', 'aiohttp', 'numpy', 'fsspec', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("seals", [0, 0x2, 0x4])
def test_memory_that_could_shrink_is_refused_with_the_reason(
    seals: int, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    rank = make_rank()
    rank.attach(b"x" * 5000, seals=seals)
    refused = rank.replies.get(timeout=DEADLINE_S)
    assert isinstance(refused, Refused)
    assert "seals" in refused.why
    rank.link.write(order(place, 1, data=b"x" * 5000))
    assert "not attached" in (rank.part().why or "")
    assert "not attached" in (rank.done().why or "")
    assert rank.save(place, 2).why is None, "the next one is taken"


def test_a_slot_of_another_size_or_kind_is_refused(start_writer: StartWriter, short: Path) -> None:
    replies: list[object] = []
    path = start_writer().path
    link = WriterLink(path, job="j", rank=0, on_reply=replies.append)
    with (short / "plain").open("w+b") as plain:
        link.attach(0, plain.fileno(), 10)
        fd = memory(b"y" * 100)
        link.attach(1, fd, 200)
        os.close(fd)
        deadline(lambda: len(replies) == 2)
    link.close()
    assert [r.slot for r in replies if isinstance(r, Refused)] == [0, 1]


def deadline(holds: object) -> None:
    import threading
    import time

    end = time.monotonic() + DEADLINE_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        frame(Attach(job="j", rank=0, slot=0, size_bytes=5)),
        b"\x01",
    ],
)
def test_rubbish_ends_one_connection_and_nothing_else(
    rubbish: bytes, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(writer.path))
        stranger.sendall(rubbish)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(DEADLINE_S)
        while stranger.recv(4096):
            pass
    assert make_rank().save(place, 1).why is None
    assert writer.alive


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file": "../evil"}, "no name"),
        ({"file": "COMMIT.json"}, "no name"),
        ({"place": ""}, "no place"),
        ({"slot": 7}, "slot 7 was not attached"),
        ({"size_bytes": 400_000}, "not in a slot"),
        ({"start": -1}, "not in a slot"),
        ({"place": "nonsense://x"}, "nonsense"),
    ],
)
def test_an_order_that_makes_no_sense_is_answered(
    change: dict[str, object],
    says: str,
    start_writer: StartWriter,
    make_rank: MakeRank,
    place: Path,
) -> None:
    start_writer()
    rank = make_rank()
    rank.attach(contents(0, 1))
    rank.link.write(msgspec.structs.replace(order(place, 1), **change))
    assert says in (rank.part().why or "")
    assert says in (rank.done().why or "")


def test_what_a_dead_writer_has_not_answered_the_link_does_and_a_new_one_is_used(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer("before-marker:kill")
    rank = make_rank()
    rank.order(place, 1)
    assert rank.part().why is None
    assert "writer is gone" in (rank.done().why or "")

    start_writer()
    rank.link.write(order(place, 1))
    assert rank.part().why is None, "the slot was attached to the new one"
    assert rank.done().why is None
    marker.verify(place / "s000001-g1")


def test_orders_to_nobody_are_answered(make_rank: MakeRank, place: Path) -> None:
    rank = make_rank()
    rank.order(place, 1)
    reply = rank.replies.get(timeout=DEADLINE_S)
    assert isinstance(reply, PartDone)
    assert "No such file" in (reply.why or "")
    assert "No such file" in (rank.done().why or "")


def test_a_stopped_writer_takes_no_more_but_finishes(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer: Writer = start_writer("before-fsync:sleep=0.5")
    rank = make_rank()
    rank.order(place, 1)
    deadline((place / "s000001-g1").is_dir)
    os.kill(writer.pid, END)
    assert rank.part().why is None
    assert rank.done().why is None
    assert writer.close(DEADLINE_S)
    assert not writer.path.exists()


def test_one_that_hangs_ends_after_its_grace(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer("before-fsync:sleep=3600", grace_s=0.3)
    rank = make_rank()
    rank.order(place, 1)
    deadline((place / "s000001-g1").is_dir)
    assert not writer.close(DEADLINE_S), "it says that it could not finish"
    assert "writer is gone" in (rank.part().why or "")
