"""NVML's bindings for cards that are made up: those of SAID_CARDS, by the names of nvidia-smi's
fields. A text there is why the driver fails; without SAID_CARDS there is none."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

nvmlMemory_v2 = 2
NVML_GPU_UTILIZATION_SAMPLES = 1
_MIB = 2**20


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_ArgumentVersionMismatch(NVMLError):
    pass


def _said() -> Any:
    return json.loads(os.environ["SAID_CARDS"])


def nvmlInit() -> None:
    if "SAID_CARDS" not in os.environ:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if isinstance(_said(), str):
        raise NVMLError(_said())


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return "".join(card["driver_version"] for card in _said()[:1])


def nvmlDeviceGetCount() -> int:
    return len(_said())


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    return _said()[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> Any:
    found = [card for card in _said() if card["uuid"] == uuid]
    if not found:
        raise NVMLError_NotFound("Not Found")
    return found[0]


def nvmlDeviceGetSamples(card: Any, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
    assert kind == NVML_GPU_UTILIZATION_SAMPLES
    told = next(one for one in _said() if one["uuid"] == card["uuid"]).get("samples", ())
    if not told:
        raise NVMLError_NotFound("Not Found")
    values = [(time, SimpleNamespace(uiVal=percent)) for time, percent in told]
    return 1, [SimpleNamespace(timeStamp=time, sampleValue=value) for time, value in values]


def nvmlDeviceGetUUID(card: Any) -> str:
    return str(card["uuid"])


def nvmlDeviceGetName(card: Any) -> str:
    return str(card["name"])


def _number(card: Any, name: str) -> int:
    if not card[name].isdigit():
        raise NVMLError_NotSupported("Not Supported")
    return int(card[name]) * _MIB


def nvmlDeviceGetMemoryInfo(card: Any, version: int | None = None) -> SimpleNamespace:
    total, used = _number(card, "memory.total"), _number(card, "memory.used")
    if version is None:
        return SimpleNamespace(total=total, free=total - used)
    if not card["memory.reserved"].isdigit():
        raise NVMLError_FunctionNotFound("Function Not Found")
    reserved = _number(card, "memory.reserved")
    return SimpleNamespace(total=total, reserved=reserved, free=total - reserved - used)


def nvmlDeviceGetCudaComputeCapability(card: Any) -> tuple[int, int]:
    major, dot, minor = card["compute_cap"].partition(".")
    if not dot:
        raise NVMLError_NotSupported("Not Supported")
    return int(major), int(minor)


def nvmlDeviceGetMigMode(card: Any) -> list[int]:
    if card["mig.mode.current"] == "[N/A]":
        raise NVMLError_NotSupported("Not Supported")
    return [int(card["mig.mode.current"] == "Enabled")] * 2


def nvmlDeviceGetMaxMigDeviceCount(card: Any) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(card: Any, index: int) -> Any:
    if index >= len(card["parts"]):
        raise NVMLError_NotFound("Not Found")
    return card["parts"][index]


def nvmlDeviceGetComputeRunningProcesses(card: Any) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * _MIB)
        for pid, _, mib in card.get("processes", ())
    ]


def nvmlSystemGetProcessName(pid: int) -> str:
    devices = [device for card in _said() for device in (card, *card.get("parts", ()))]
    names = {p: name for d in devices for p, name, _ in d.get("processes", ())}
    if names.get(pid) is None:
        raise NVMLError_NotFound("Not Found")
    return str(names[pid])
