"""The real binding against a stand-in for the driver's library, broken while the agent looks."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.plugins.collectors.nvml import NvmlCollector
from everstep.sdk import Finding, Reading

SOURCE = Path(__file__).parent / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
RETRY_S = 60.0

if shutil.which("gcc") is None:
    pytest.skip("the stand-in for the driver is built with gcc", allow_module_level=True)


class Seen(msgspec.Struct):
    """What one look returned."""

    readings: list[Reading]
    findings: list[Finding]

    def value(self, name: str, gpu: int = 0, **more: str) -> float | None:
        """Return the one value of a GPU by metric."""
        (found,) = (
            r for r in self.of(gpu) if r.name == name and more.items() <= r.attributes.items()
        )
        return found.value

    def of(self, gpu: int) -> list[Reading]:
        """Return all readings of a GPU."""
        return [r for r in self.readings if r.attributes["hw.id"] == f"GPU-fake-{gpu}"]

    def status(self, gpu: int) -> str:
        """Return the state that holds."""
        (state,) = (
            r.attributes["hw.state"] for r in self.of(gpu) if r.name == "hw.status" and r.value == 1
        )
        return state

    @property
    def told(self) -> list[tuple[str, str, bool]]:
        """Return the findings in short."""
        return [(f.name, f.component, f.resolved) for f in self.findings]


class Seat:
    """A collector in a process of its own, and the state of the driver that it sees."""

    def __init__(self, library_dir: Path, state: Path) -> None:
        self._state = state
        self.library_dir = library_dir
        self.now_s = 0.0
        self.set()
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library_dir), "FAKE_NVML_STATE": str(state)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.plugins.collectors.nvml.collector_seat", str(RETRY_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[4],
            env=environ,
            text=True,
        )

    def set(self, *, gpus: str = "0 1", init: int = 0, **state: Any) -> None:
        """Put the driver into a state; `gpu0_power_error=3` is 0.power.error=3 in its file."""
        lines = [f"gpus={gpus}\n", f"init={init}\n"]
        for key, value in state.items():
            lines.append(f"{key.removeprefix('gpu').replace('_', '.')}={value}\n")
        temporary = self._state.with_suffix(".new")
        temporary.write_text("".join(lines))
        temporary.rename(self._state)

    def look(self, *, after_s: float = 1.0) -> Seen:
        """Let time pass and look."""
        return msgspec.convert(self._ask("collect", after_s), Seen)

    def supported(self, *, after_s: float = 0.0) -> str | None:
        """Let time pass and ask whether there is anything to look at."""
        answer: str | None = self._ask("supported", after_s)
        return answer

    def broken_rules(self) -> list[str]:
        """Run the contract suite in the collector's process."""
        rules: list[str] = self._ask("contract", 0.0)
        return rules

    def _ask(self, verb: str, after_s: float) -> Any:
        self.now_s += after_s
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{verb} {self.now_s}\n")
        self._child.stdin.flush()
        return msgspec.json.decode(self._child.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.communicate()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds the stand-in, once per set of flags."""
    made: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in made:
            folder = tmp_path_factory.mktemp("nvml")
            command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
            command += [f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY), str(SOURCE)]
            subprocess.run(command, check=True, timeout=60)
            made[flags] = folder
        return made[flags]

    return build


Sit = Callable[..., Seat]


@pytest.fixture
def sit(tmp_path: Path) -> Iterator[Sit]:
    """Return a function that starts a collector which finds its library in a folder."""
    seats: list[Seat] = []

    def start(library_dir: Path) -> Seat:
        seats.append(Seat(library_dir, tmp_path / f"driver-{len(seats)}"))
        return seats[-1]

    yield start
    for seat in seats:
        seat.close()


@pytest.fixture
def seat(built: Callable[..., Path], sit: Sit) -> Seat:
    return sit(built())


def test_healthy_gpus_are_read_in_plain_units(seat: Seat) -> None:
    seat.set(gpu0_temperature=61, gpu0_power=345678, gpu0_utilization=97, gpu0_used=7 << 30)
    seen = seat.look()
    assert seen.value("hw.temperature") == 61
    assert seen.value("hw.power") == 345.678
    assert seen.value("hw.gpu.utilization") == 0.97
    assert seen.value("hw.gpu.memory.usage") == 7 << 30
    assert seen.value("hw.gpu.memory.limit") == 80 << 30
    assert seen.value("everstep.gpu.recovery_action") == 0
    assert seen.value("hw.temperature", gpu=1) == 40
    assert (seen.status(0), seen.status(1), seen.findings) == ("ok", "ok", [])


def test_a_gpu_is_known_by_uuid_and_pci_address(seat: Seat) -> None:
    (info,) = (r for r in seat.look().of(1) if r.name == "everstep.gpu.info")
    assert info.attributes == {
        "hw.id": "GPU-fake-1",
        "hw.type": "gpu",
        "hw.name": "0000:3c:00.0",
        "hw.model": "Fake H100",
        "hw.vendor": "NVIDIA",
        "hw.driver_version": "550.00.fake",
    }


def test_the_contract_is_kept_with_a_driver(seat: Seat) -> None:
    assert seat.broken_rules() == []


def test_a_call_that_the_driver_never_answers_is_seen_by_whoever_calls(seat: Seat) -> None:
    seat.set(gpu0_power_hang=1)
    assert seat.broken_rules() == ["collect() did not come back within 1 s"]


@pytest.mark.parametrize(
    ("call", "metric"),
    [
        ("temperature", "hw.temperature"),
        ("power", "hw.power"),
        ("utilization", "hw.gpu.utilization"),
        ("used", "hw.gpu.memory.usage"),
        ("field230", "everstep.gpu.recovery_action"),
    ],
)
@pytest.mark.parametrize("code", [3, 13, 25], ids=["not supported", "no function", "version"])
def test_what_a_gpu_does_not_have_is_empty_and_not_zero(
    seat: Seat, call: str, metric: str, code: int
) -> None:
    unsupported: dict[str, Any] = {f"gpu0_{call}_error": code}
    seat.set(**unsupported)
    seen = seat.look()
    assert seen.value(metric) is None
    assert seen.value(metric, gpu=1) is not None
    assert seen.value("everstep.gpu.readings.dropped") == 0
    assert (seen.status(0), seen.findings) == ("ok", [])


def test_nothing_supported_at_all_is_a_gpu_that_says_little(seat: Seat) -> None:
    seat.look()
    seat.set(gpu0_error=3)
    for _ in range(5):
        seen = seat.look()
        assert (seen.status(0), seen.findings) == ("ok", [])


@pytest.mark.parametrize(
    ("garbage", "metric"),
    [
        ({"gpu0_temperature": 2**31 - 1}, "hw.temperature"),
        ({"gpu0_temperature": -127}, "hw.temperature"),
        ({"gpu0_power": 2**32 - 1}, "hw.power"),
        ({"gpu0_utilization": 905}, "hw.gpu.utilization"),
        ({"gpu0_utilization": 2**32 - 1}, "hw.gpu.utilization"),
        ({"gpu0_used": 81 << 30}, "hw.gpu.memory.usage"),
        ({"gpu0_total": 0}, "hw.gpu.memory.limit"),
        ({"gpu0_total": 2**64 - 2048}, "hw.gpu.memory.limit"),
        ({"gpu0_field230": 2**32 - 1}, "everstep.gpu.recovery_action"),
        ({"gpu0_field230_type": 99}, "everstep.gpu.recovery_action"),
        ({"gpu0_power_error": 999}, "hw.power"),
        ({"gpu0_temperature_error": 10}, "hw.temperature"),
    ],
)
def test_garbage_is_left_out_and_counted(seat: Seat, garbage: dict[str, Any], metric: str) -> None:
    seat.look()
    seat.set(**garbage)
    seen = seat.look()
    for looks in (1, 2):
        assert metric not in {r.name for r in seen.of(0)}
        assert (seen.value("everstep.gpu.readings.dropped") or 0) >= looks
        assert seen.value("everstep.gpu.readings.dropped", gpu=1) == 0
        assert seen.findings == []
        seen = seat.look()
    seat.set()
    assert seat.look().value(metric) is not None


def test_an_old_driver_without_the_newer_calls_is_asked_the_old_way(
    built: Callable[..., Path], sit: Sit
) -> None:
    seat = sit(built("-DOLD_DRIVER"))
    seat.set(gpu0_temperature=55, gpu0_used=1 << 30)
    seen = seat.look()
    assert seen.value("hw.temperature") == 55
    assert seen.value("hw.gpu.memory.usage") == (1 << 30) + (1 << 29)


@pytest.mark.parametrize(("code", "action"), [(15, "evict_node"), (16, "reset_gpu")])
def test_a_lost_gpu_is_told_once_and_the_others_go_on(seat: Seat, code: int, action: str) -> None:
    seat.look()
    seat.set(gpu1_error=code)
    seen = seat.look()
    (finding,) = seen.findings
    assert (finding.name, finding.component) == ("gpu.lost", "gpu:GPU-fake-1")
    assert (finding.severity, finding.suggested_action) == ("fatal", action)
    assert "0000:3c:00.0" in finding.summary
    assert f"NVML error {code}" in finding.evidence[0].what
    assert finding.at_s == 1e9 + seat.now_s
    assert (seen.status(0), seen.status(1)) == ("ok", "failed")
    assert "hw.temperature" not in {r.name for r in seen.of(1)}
    assert seen.value("hw.temperature", gpu=0) == 40
    for _ in range(3):
        assert seat.look().findings == []


def test_a_gpu_that_was_reset_is_found_again_and_its_end_is_told(seat: Seat) -> None:
    seat.look()
    seat.set(gpu1_error=15)
    seat.look()
    seat.set()
    seen = seat.look(after_s=RETRY_S)
    assert seen.told == [("gpu.lost", "gpu:GPU-fake-1", True)]
    assert seen.status(1) == "ok"


def test_a_gpu_that_left_the_list_is_lost_and_no_other_takes_its_identity(seat: Seat) -> None:
    seat.set(gpus="0 1 2", gpu2_power=222000)
    assert seat.look().value("hw.power", gpu=2) == 222
    seat.set(gpus="0 2", gpu2_power=222000, gpu1_error=15)
    seen = seat.look(after_s=RETRY_S)
    assert seen.told == [("gpu.lost", "gpu:GPU-fake-1", False)]
    seen = seat.look(after_s=RETRY_S)
    assert seen.value("hw.power", gpu=2) == 222
    assert [seen.status(n) for n in (0, 1, 2)] == ["ok", "failed", "ok"]
    assert seen.findings == []


def test_a_gpu_that_was_lost_before_the_agent_came_is_told_by_its_place(seat: Seat) -> None:
    seat.set(gpu1_error=15)
    seen = seat.look()
    assert seen.told == [("gpu.lost", "gpu:index-1", False)]
    assert seen.status(0) == "ok"
    seat.set()
    seen = seat.look(after_s=RETRY_S)
    assert seen.told == [("gpu.lost", "gpu:index-1", True)]
    assert seen.status(1) == "ok"


@pytest.mark.parametrize("code", [4, 3, 999])
def test_a_gpu_that_may_not_be_opened_belongs_to_somebody_else(seat: Seat, code: int) -> None:
    seat.set(gpu1_handle_error=code)
    for _ in range(4):
        seen = seat.look()
        assert (seen.status(0), seen.of(1), seen.findings) == ("ok", [], [])


@pytest.mark.parametrize(
    ("code", "severity", "action", "word"),
    [
        (1, "fatal", "reset_gpu", "gpu_reset"),
        (2, "fatal", "evict_node", "node_reboot"),
        (4, "error", "reset_gpu", "drain_and_reset"),
        (7, "fatal", "evict_node", "system_reboot"),
        (42, "error", "monitor", "action 42, unknown here"),
    ],
)
def test_what_the_driver_asks_for_is_told_when_it_begins_and_ends(
    seat: Seat, code: int, severity: str, action: str, word: str
) -> None:
    seat.set(gpu0_field230=code)
    seen = seat.look()
    (finding,) = seen.findings
    assert (finding.name, finding.severity) == ("gpu.recovery_action", severity)
    assert finding.suggested_action == action
    assert word in finding.summary
    assert seen.value("everstep.gpu.recovery_action") == code
    assert seen.status(0) == "degraded"
    assert seat.look().findings == []
    seat.set()
    assert seat.look().told == [("gpu.recovery_action", "gpu:GPU-fake-0", True)]


def test_what_the_driver_asks_for_getting_worse_is_news(seat: Seat) -> None:
    seat.set(gpu0_field230=4)
    seat.look()
    seat.set(gpu0_field230=2)
    assert [f.severity for f in seat.look().findings] == ["fatal"]


def test_a_gpu_that_answers_nothing_for_a_while_is_told_and_not_called_lost(seat: Seat) -> None:
    seat.look()
    seat.set(gpu0_error=999)
    assert [seat.look().told for _ in range(2)] == [[], []]
    seen = seat.look()
    assert seen.told == [("gpu.unreadable", "gpu:GPU-fake-0", False)]
    assert seen.findings[0].severity == "warning"
    assert seen.status(1) == "ok"


def test_a_gpu_that_can_no_longer_be_opened_is_not_known_to_be_lost(seat: Seat) -> None:
    seat.look()
    seat.set(gpu1_error=999)  # as in a container whose device files were taken away
    told = [what for _ in range(6) for what in seat.look(after_s=RETRY_S / 2).told]
    assert told == [("gpu.unreadable", "gpu:GPU-fake-1", False)]
    seat.set()
    seen = seat.look(after_s=RETRY_S)
    assert seen.told == [("gpu.unreadable", "gpu:GPU-fake-1", True)]
    assert seen.status(1) == "ok"


# ------------------------------------------------------------------------- without a driver


def test_a_machine_whose_driver_is_not_loaded_is_a_normal_state(seat: Seat) -> None:
    seat.set(init=9)
    assert seat.supported() == "no NVIDIA driver here: Driver Not Loaded"
    assert seat.look() == Seen([], [])


def test_a_driver_that_is_loaded_later_is_found(seat: Seat) -> None:
    seat.set(init=9)
    assert seat.supported() is not None
    seat.set()
    assert seat.look().readings == []  # not due yet
    assert seat.look(after_s=RETRY_S).value("hw.temperature") == 40
    assert seat.supported() is None


def test_gpus_that_are_bound_later_are_found(seat: Seat) -> None:
    seat.set(gpus="")
    assert seat.supported() == "the NVIDIA driver has no GPU"
    seat.set()
    assert seat.supported(after_s=RETRY_S) is None
    assert seat.look().value("hw.temperature") == 40


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has the real library"
)
def test_a_machine_without_the_library_is_a_normal_state_and_one_that_gets_it_is_found(
    tmp_path: Path, built: Callable[..., Path], sit: Sit
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    seat = sit(folder)
    assert seat.supported() == "no NVIDIA driver here: NVML Shared Library Not Found"
    assert seat.look() == Seen([], [])
    assert seat.broken_rules() == ["README.md documents what collect() did not return: "
        "everstep.gpu.info, everstep.gpu.readings.dropped, everstep.gpu.recovery_action, "
        "hw.gpu.memory.limit, hw.gpu.memory.usage, hw.gpu.utilization, hw.power, hw.status, "
        "hw.temperature"]  # fmt: skip
    shutil.copy(built() / LIBRARY, folder)
    assert seat.look(after_s=RETRY_S).value("hw.temperature") == 40


@pytest.mark.parametrize("code", [18, 4, 999], ids=["mismatch", "no permission", "unknown"])
def test_a_driver_that_is_there_and_cannot_be_asked_is_no_normal_state(
    seat: Seat, code: int
) -> None:
    seat.set(init=code)
    assert seat.supported() is None
    seen = seat.look()
    assert seen.told == [("nvml.unusable", "host", False)]
    assert seen.findings[0].severity == "error"
    assert ("reboot" in seen.findings[0].summary) == (code == 18)
    assert seat.look().findings == []
    seat.set()
    assert seat.look(after_s=RETRY_S).told == [("nvml.unusable", "host", True)]


def test_a_driver_that_goes_away_does_not_make_its_gpus_lost_or_well(seat: Seat) -> None:
    seat.set(gpu1_field230=2)
    seat.look()
    seat.set(gpu0_error=999, gpu1_error=999)  # what calls return while it is being unloaded
    assert seat.look().told == []
    seat.set(init=9)
    seen = seat.look(after_s=RETRY_S)
    assert seen.told == [("nvml.unusable", "host", False)]
    assert seen.readings == []
    seat.set()
    assert sorted(seat.look(after_s=RETRY_S).told) == [
        ("gpu.recovery_action", "gpu:GPU-fake-1", True),
        ("nvml.unusable", "host", True),
    ]


def test_a_gpu_whose_driver_asked_for_a_reboot_and_then_lost_it_is_not_better(seat: Seat) -> None:
    seat.set(gpu1_field230=2)
    seat.look()
    seat.set(gpu1_error=15)
    assert seat.look().told == [("gpu.lost", "gpu:GPU-fake-1", False)]


def test_the_binding_is_loaded_only_when_the_collector_looks() -> None:
    code = (
        "import sys; from everstep.plugins.collectors.nvml import NvmlCollector as C\n"
        "c = C(C.Config(), clock=lambda: 0.0); print('pynvml' in sys.modules); c.collect()\n"
        "print('pynvml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "True"]
    assert NvmlCollector.Config().retry_s == RETRY_S
