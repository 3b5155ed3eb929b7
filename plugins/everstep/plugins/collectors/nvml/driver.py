"""The NVIDIA driver's library, asked through nvidia-ml-py: the only input and output here."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.plugins.collectors.nvml.parse import (
    ARGUMENT_VERSION_MISMATCH,
    FUNCTION_NOT_FOUND,
    GONE,
    Answer,
    Error,
    Gpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_FIELD_RECOVERY_ACTION = 230
_VALUE_MEMBER = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class DriverError(Exception):
    """The library is not there or does not start; carries the NVML error."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.text)
        self.error = error


class Handle(NamedTuple):
    """A GPU and how the library calls it until it is closed."""

    gpu: Gpu
    raw: Any


class Driver:
    """An open library and the GPUs in its list when that was read.

    `unopened` are those in its list that could not be opened, so that nobody knows who they are:
    by index, with the error.
    """

    def __init__(self) -> None:
        """Open the library, which is quick: no GPU is woken. Raises DriverError."""
        # Imported here: a machine without a GPU need not pay for it.
        import pynvml

        self._nvml = pynvml
        self.handles: list[Handle] = []
        self.unopened: dict[int, Error] = {}
        try:
            pynvml.nvmlInitWithFlags(0)
        except pynvml.NVMLError as exc:
            raise DriverError(_error(exc)) from exc
        try:
            self.count: int = pynvml.nvmlDeviceGetCount()
            self._version: str = pynvml.nvmlSystemGetDriverVersion()
        except pynvml.NVMLError as exc:
            self.close()
            raise DriverError(_error(exc)) from exc

    def read_list(self) -> None:
        """Open every GPU. Where nothing else holds one open this may take seconds for each."""
        for index in range(self.count):
            try:
                raw = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self.handles.append(Handle(self._who(raw), raw))
            except self._nvml.NVMLError as exc:
                self.unopened[index] = _error(exc)

    def _who(self, raw: Any) -> Gpu:
        pci = self._nvml.nvmlDeviceGetPciInfo(raw)
        return Gpu(
            uuid=self._nvml.nvmlDeviceGetUUID(raw),
            pci=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
            model=self._nvml.nvmlDeviceGetName(raw),
            driver=self._version,
        )

    def close(self) -> None:
        """Let go of every GPU: a handle that is held keeps the driver from being reset."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def look(self, handle: Handle) -> dict[str, Answer]:
        """Return one answer per question; all are the same error once the GPU is gone."""
        answers: dict[str, Answer] = {}
        questions = {
            "temperature": self._temperature,
            "power": self._nvml.nvmlDeviceGetPowerUsage,
            "utilization": lambda raw: self._nvml.nvmlDeviceGetUtilizationRates(raw).gpu,
            "recovery_action": self._recovery_action,
        }
        for key, question in questions.items():
            answers[key] = self._ask(question, handle.raw)
        memory = self._ask(self._memory, handle.raw)
        answers["memory_limit"] = memory if isinstance(memory, Error) else memory.total
        answers["memory_usage"] = memory if isinstance(memory, Error) else memory.used
        for answer in answers.values():
            if isinstance(answer, Error) and answer.code in GONE:
                return dict.fromkeys(answers, answer)
        return answers

    def _ask(self, question: Callable[[Any], Any], raw: Any) -> Any:
        try:
            return question(raw)
        except self._nvml.NVMLError as exc:
            return _error(exc)

    def _temperature(self, raw: Any) -> float:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return float(
            self._newest(
                lambda: self._nvml.nvmlDeviceGetTemperatureV(raw, sensor),
                lambda: self._nvml.nvmlDeviceGetTemperature(raw, sensor),
            )
        )

    def _memory(self, raw: Any) -> Any:
        # The first version counts what the driver keeps for itself as used.
        return self._newest(
            lambda: self._nvml.nvmlDeviceGetMemoryInfo(raw, version=self._nvml.nvmlMemory_v2),
            lambda: self._nvml.nvmlDeviceGetMemoryInfo(raw),
        )

    def _newest(self, new: Callable[[], Any], old: Callable[[], Any]) -> Any:
        try:
            return new()
        except self._nvml.NVMLError as exc:
            if _error(exc).code not in {FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH}:
                raise
        return old()

    def _recovery_action(self, raw: Any) -> float:
        (field,) = self._nvml.nvmlDeviceGetFieldValues(raw, [_FIELD_RECOVERY_ACTION])
        if field.nvmlReturn:
            raise self._nvml.NVMLError(field.nvmlReturn)
        if not 0 <= field.valueType < len(_VALUE_MEMBER):
            return float("nan")
        return float(getattr(field.value, _VALUE_MEMBER[field.valueType]))


def _error(exc: Any) -> Error:
    return Error(int(exc.value), str(exc))
