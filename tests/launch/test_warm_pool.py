"""What a pool does when what it has loaded is stale, when its nursery dies, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.scripted import alive
from tests.launch.warmed import SUBJECT, Warmed, environment, finish, ready
from tests.waiting import wait_until

from everstep.launch.warm.berth import PoolError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SAY_NAME = "import sys, torch\nprint(__name__, __package__, __spec__ and __spec__.name, sys.argv)\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import os\nprint(os.environ.get('COLOUR'), os.getcwd())\n")
    return path


@pytest.fixture
def warmed(script: Path) -> Iterator[Warmed]:
    made = Warmed([script.name], environment(), script.parent)
    yield made
    made.close()


def test_a_rank_that_comes_too_early_waits_for_the_nursery(warmed: Warmed) -> None:
    ended = finish(warmed.start())
    assert ended.out.startswith("None")
    assert (ended.code, len(warmed.born), warmed.said) == (0, 1, [])


def test_with_another_variable_it_starts_cold_once_and_warm_the_next_time(warmed: Warmed) -> None:
    warmed.warm()
    for births in (0, 1):
        ended = finish(warmed.start(environ={"COLOUR": "red", "RANK": "1", "MASTER_PORT": "7"}))
        assert (ended.code, ended.out.split()[0], len(warmed.born)) == (0, "red", births)
        assert warmed.said == ["ranks start cold: the environment variable COLOUR has changed"]
        wait_until("the next nursery", lambda: warmed.pool.ready)


def test_in_another_folder_it_starts_cold(warmed: Warmed, script: Path) -> None:
    (script.parent / "sub").mkdir()
    (script.parent / "sub" / script.name).write_text("print('the other')\n")
    warmed.warm()
    assert finish(warmed.start(cwd=script.parent / "sub")).out == "the other\n"
    assert "the working folder is" in warmed.said[0]


def test_another_script_starts_cold(warmed: Warmed) -> None:
    warmed.warm()
    assert finish(warmed.start(command=["-c", "print('hello')"])).out == "hello\n"
    assert warmed.said == ["ranks start cold: the script is another one"]


@pytest.mark.parametrize("shadow", ["xxhash.py", "numpy/__init__.py", "random.py"])
def test_a_module_beside_the_script_that_a_cold_rank_would_import_is_imported(
    script: Path, shadow: str
) -> None:
    path = script.parent / shadow
    path.parent.mkdir(exist_ok=True)
    name = shadow.partition("/")[0].removesuffix(".py")
    path.write_text("MINE = True\n")
    script.write_text(f"import {name}\nprint({name}.MINE)\n")
    made = Warmed([script.name], environment(), script.parent)
    try:
        made.warm()
        assert finish(made.start()).out == "True\n"
        assert shadow.partition("/")[0] in made.said[0]
        assert "stands before a loaded module of the same name" in made.said[0]
        assert finish(made.start()).out == "True\n"
    finally:
        made.close()


def test_a_loaded_file_that_changed_is_loaded_anew(tmp_path: Path) -> None:
    library = tmp_path / "library" / "pet.py"
    library.parent.mkdir()
    library.write_text("NAME = 'cat'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys; print('pet' in sys.modules)\nimport pet; print(pet.NAME)\n")
    path = f"{library.parent}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**environment(), "PYTHONPATH": path, "EVERSTEP_PRELOAD": "pet"}
    made = Warmed([str(script)], environ, tmp_path)
    try:
        made.warm()
        assert finish(made.start()).out == "True\ncat\n"
        library.write_text("NAME = 'guinea pig'\n")
        wait_until("it is looked for again", lambda: finish(made.start()).out != "True\ncat\n")
        assert made.said == [f"ranks start cold: {library} has changed since it was loaded"]
        wait_until("the next nursery", lambda: made.pool.ready)
        assert finish(made.start()).out == "True\nguinea pig\n"
    finally:
        made.close()


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ValueError('no')", "cannot load its modules: ValueError: no"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True)"
         ".start()", "has 2 threads"),
    ],
)  # fmt: skip
def test_a_nursery_that_must_not_be_forked_from_is_not(
    tmp_path: Path, module: str, says: str
) -> None:
    (tmp_path / "odd.py").write_text(module + "\n")
    (tmp_path / "script.py").write_text("print('cold')\n")
    made = Warmed(["script.py"], {**environment(), "EVERSTEP_PRELOAD": "odd"}, tmp_path)
    try:
        assert finish(made.start()).out == "cold\n"
        assert says in made.said[0]
        assert made.pool.nurseries() == []
    finally:
        made.close()


def test_the_users_own_sitecustomize_counts(script: Path) -> None:
    (script.parent / "sitecustomize.py").write_text("import os\nos.environ['COLOUR'] = 'blue'\n")
    path = f"{script.parent}:{os.environ.get('PYTHONPATH', '')}"
    made = Warmed([script.name], {**environment(), "PYTHONPATH": path}, script.parent)
    try:
        made.warm()
        assert finish(made.start()).out.startswith("blue")
        assert len(made.born) == 1
    finally:
        made.close()


@pytest.mark.parametrize("kind", ["module", "package", "folder"])
def test_modules_packages_and_folders_run_as_ever(tmp_path: Path, kind: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text(SAY_NAME + "raise KeyError(1)\n")
    (tmp_path / "pkg" / "part.py").write_text(SAY_NAME + "raise KeyError(1)\n")
    command = {"module": ["-m", "pkg.part"], "package": ["-m", "pkg"], "folder": ["pkg"]}[kind]
    made = Warmed(command, environment(), tmp_path)
    try:
        warm, cold = made.warm().both("--lr", "1")
        assert warm == cold
        assert "KeyError: 1" in warm.err
    finally:
        made.close()


def test_ranks_die_with_their_nursery_and_the_next_one_is_built() -> None:
    made = Warmed([str(SUBJECT)], environment(), Path("/tmp"))
    try:
        shims = [made.warm().start("sleep", local_rank=rank) for rank in range(2)]
        for shim in shims:
            ready(shim)
        pids = [rank.pid for rank in made.born]
        (nursery,) = made.pool.nurseries()
        os.kill(nursery, signal.SIGKILL)
        assert [finish(shim).code for shim in shims] == [-9, -9]
        wait_until("the ranks' end", lambda: not any(alive(pid) for pid in pids))
        assert made.said == [f"nursery {nursery} has died, and with it 2 ranks"]
        wait_until("the next nursery", lambda: made.pool.ready)
        assert finish(made.start("exit", "0")).code == 0
        assert len(made.born) == 3
    finally:
        made.close()


def test_what_cannot_be_replaced_is_said_and_its_shim_waits() -> None:
    made = Warmed([str(SUBJECT)], environment(), Path("/tmp"))
    try:
        with pytest.raises(PoolError, match="behind no shim"):
            made.warm().pool.replace(0, {})
        made.pool.hold(on=True)
        shim = made.start("sleep")
        ready(shim)
        made.born[0].send(signal.SIGKILL)
        wait_until("its end", lambda: made.ends)
        with pytest.raises(PoolError, match="variable OMP_NUM_THREADS has changed"):
            made.pool.replace(0, {"OMP_NUM_THREADS": "3"})
        shim.terminate()  # torchrun stops a shim that nobody is behind
        assert finish(shim).code == -signal.SIGTERM
    finally:
        made.close()


def test_thirty_ranks_leave_no_process_and_no_descriptor_behind() -> None:
    made = Warmed([str(SUBJECT)], environment(), Path("/tmp"))
    try:
        made.warm()
        finish(made.start("exit", "0"))
        (nursery,) = made.pool.nurseries()
        before = (descriptors(os.getpid()), descriptors(nursery), children(nursery))
        for _ in range(10):
            shims = [made.start("_exit", local_rank=rank) for rank in range(3)]
            assert [finish(shim).code for shim in shims] == [3, 3, 3]
        assert len(made.born) == 31

        def now() -> tuple[int, int, list[int]]:
            return descriptors(os.getpid()), descriptors(nursery), children(nursery)

        wait_until(f"as before: {before}", lambda: now() == before)
        assert made.pool.ranks() == {}
    finally:
        made.close()


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from tests.launch.warmed import *\n"
        "made = Warmed([str(SUBJECT)], environment(), Path('/tmp')).warm()\n"
        "shim = made.start('sleep')\nready(shim)\n"
        "print(shim.pid, made.born[0].pid, *made.pool.nurseries(), flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.communicate()
    wait_until("their ends", lambda: not any(alive(pid) for pid in pids))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_a_slow_shim_does_not_hold_up_the_others(warmed: Warmed) -> None:
    import socket

    warmed.warm()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(warmed.pool.folder / "pool"))
        silent.send(b"\x10")
        began_s = time.monotonic()
        assert finish(warmed.start()).code == 0
        assert time.monotonic() - began_s < 10
