"""What the driver answers, as readings and findings: pure, no driver needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from everstep.sdk import Evidence, Finding, Reading, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 9, 12
FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH = 13, 15, 16, 18
ARGUMENT_VERSION_MISMATCH = 25

UNSUPPORTED = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
ABSENT = frozenset({LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED})
GONE = frozenset({GPU_IS_LOST, RESET_REQUIRED})

NAMELESS = "index-"
"""What the id of a GPU begins with that was lost before anybody could ask who it is."""


class Gpu(NamedTuple):
    """Who a GPU is. Its index is not part of that: it shifts when another one drops out."""

    uuid: str
    pci: str
    model: str = ""
    driver: str = ""

    @property
    def named(self) -> bool:
        """Return whether its identity is known, so that it can be found again."""
        return not self.uuid.startswith(NAMELESS)

    @property
    def component(self) -> str:
        """Return the name that findings use."""
        return f"gpu:{self.uuid}"

    @property
    def attributes(self) -> dict[str, str]:
        """Return the identity that every reading carries."""
        return {"hw.id": self.uuid, "hw.type": "gpu", "hw.name": self.pci}


class Error(NamedTuple):
    """An NVML return code other than success."""

    code: int
    text: str


Answer = float | Error


class Field(NamedTuple):
    """One thing that is asked of every GPU, and what a sane answer lies between."""

    metric: str
    unit: str
    scale: float
    low: float
    high: float
    attributes: Mapping[str, str] = {}


FIELDS: Mapping[str, Field] = {
    "temperature": Field("hw.temperature", "Cel", 1, -40, 150, {"hw.sensor_location": "gpu"}),
    "power": Field("hw.power", "W", 1e-3, 0, 10_000),
    "utilization": Field("hw.gpu.utilization", "1", 1e-2, 0, 1, {"hw.gpu.task": "general"}),
    "memory_limit": Field("hw.gpu.memory.limit", "By", 1, 1, 1 << 45),
    "memory_usage": Field("hw.gpu.memory.usage", "By", 1, 0, 1 << 45),
    # A code far above every one that is known is not a newer driver's word but garbage.
    "recovery_action": Field("everstep.gpu.recovery_action", "1", 1, 0, 255),
}


class Action(NamedTuple):
    """One of the driver's verdicts on its own GPU (NVML field 230), by its number there."""

    name: str
    severity: Severity
    suggested: str


ACTIONS: Mapping[int, Action] = {
    1: Action("gpu_reset", "fatal", "reset_gpu"),
    2: Action("node_reboot", "fatal", "evict_node"),
    3: Action("drain_p2p", "error", "wait_and_retry"),
    4: Action("drain_and_reset", "error", "reset_gpu"),
    5: Action("recover_imex_domain", "error", "wait_and_retry"),
    6: Action("bus_reset", "fatal", "reset_gpu"),
    7: Action("system_reboot", "fatal", "evict_node"),
}

Status = Literal["ok", "degraded", "failed"]


def info(gpu: Gpu) -> Reading:
    """Return what is written on the GPU, as attributes of a constant 1 to join with."""
    written = {"hw.model": gpu.model, "hw.vendor": "NVIDIA", "hw.driver_version": gpu.driver}
    return Reading(name="everstep.gpu.info", value=1, attributes={**gpu.attributes, **written})


def readings(gpu: Gpu, answers: Mapping[str, Answer]) -> tuple[list[Reading], int]:
    """Return the sane answers, None for what this GPU does not have, and how many were neither."""
    out: list[Reading] = []
    for key, field in FIELDS.items():
        answer = answers[key]
        if isinstance(answer, Error):
            value = None
            sane = answer.code in UNSUPPORTED
        else:
            value = round(answer * field.scale, 6)
            sane = field.low <= value <= field.high and _fits(key, answers)
        if sane:
            attributes = {**gpu.attributes, **field.attributes}
            out.append(
                Reading(name=field.metric, value=value, unit=field.unit, attributes=attributes)
            )
    return out, len(FIELDS) - len(out)


def _fits(key: str, answers: Mapping[str, Answer]) -> bool:
    limit, usage = answers["memory_limit"], answers["memory_usage"]
    if key != "memory_usage" or isinstance(limit, Error) or isinstance(usage, Error):
        return True
    return usage <= limit


def action(answer: Answer) -> Action | None:
    """Return what the driver asks for, None when it asks for nothing or makes no sense."""
    field = FIELDS["recovery_action"]
    if isinstance(answer, Error) or not field.low < answer <= field.high:
        return None
    return ACTIONS.get(
        int(answer), Action(f"action {int(answer)}, unknown here", "error", "monitor")
    )


def status(gpu: Gpu, now: Status) -> list[Reading]:
    """Return the state of a GPU, one series a state."""
    states: tuple[Status, ...] = ("ok", "degraded", "failed")
    return [
        Reading(
            name="hw.status",
            value=float(state == now),
            attributes={**gpu.attributes, "hw.state": state},
        )
        for state in states
    ]


def left_out(gpu: Gpu, count: int) -> Reading:
    """Return how many answers of a GPU were left out since the start."""
    return Reading(
        name="everstep.gpu.readings.dropped",
        value=count,
        unit="{reading}",
        attributes=gpu.attributes,
        counter=True,
    )


def lost(gpu: Gpu, error: Error, at_s: float) -> Finding:
    """Return the finding for a GPU that the driver has given up."""
    reset = error.code == RESET_REQUIRED
    return _finding(
        gpu,
        "gpu.lost",
        "fatal",
        f"GPU {gpu.pci} ({gpu.uuid}) is lost to the driver: {error.text}",
        "reset_gpu" if reset else "evict_node",
        Evidence(at_s=at_s, what=f"NVML error {error.code}: {error.text}", source="nvml"),
    )


def silence(answers: Mapping[str, Answer]) -> Error | None:
    """Return why a GPU answered nothing at all, None when it did, or has none of what is asked."""
    errors = [answer for answer in answers.values() if isinstance(answer, Error)]
    if len(errors) < len(answers) or any(e.code in UNSUPPORTED for e in errors):
        return None
    return errors[0]


def unreadable(gpu: Gpu, error: Error, at_s: float) -> Finding:
    """Return the finding for a GPU that answers nothing, for a reason that does not say why."""
    return _finding(
        gpu,
        "gpu.unreadable",
        "warning",
        f"GPU {gpu.pci} ({gpu.uuid}) answers nothing: {error.text}; in a container this often "
        "means that its device files were taken away",
        "monitor",
        Evidence(at_s=at_s, what=f"NVML error {error.code}: {error.text}", source="nvml"),
    )


def recovery(gpu: Gpu, wanted: Action, at_s: float) -> Finding:
    """Return the finding for a GPU whose driver asks for something to be done."""
    return _finding(
        gpu,
        "gpu.recovery_action",
        wanted.severity,
        f"the driver asks for {wanted.name} of GPU {gpu.pci} ({gpu.uuid})",
        wanted.suggested,
        Evidence(at_s=at_s, what=f"NVML field 230 is {wanted.name}", source="nvml"),
    )


def unusable(error: Error, at_s: float) -> Finding:
    """Return the finding for a driver that is there and cannot be talked to."""
    mismatch = error.code == VERSION_MISMATCH
    what_to_do = (
        "the driver was changed underneath: reload its kernel module or reboot, then restart the "
        "agent"
        if mismatch
        else "see the kernel log, and that the agent may open /dev/nvidiactl"
    )
    return Finding(
        name="nvml.unusable",
        component="host",
        severity="error",
        summary=f"the NVIDIA driver cannot be asked: {error.text}; {what_to_do}",
        at_s=at_s,
        evidence=[Evidence(at_s=at_s, what=f"NVML error {error.code}", source="nvml")],
        suggested_action="monitor",
    )


def _finding(
    gpu: Gpu, name: str, severity: Severity, summary: str, suggested: str, evidence: Evidence
) -> Finding:
    return Finding(
        name=name,
        component=gpu.component,
        severity=severity,
        summary=summary,
        at_s=evidence.at_s,
        evidence=[evidence],
        suggested_action=suggested,
    )
