"""The GPUs of this machine and what sits on them, as NVML tells, NVIDIA's management library."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from threading import Thread
from typing import Any

from plimsoll.errors import PlimsollError

_PATIENCE = 30.0  # seconds; a sick driver lets NVML hang


@dataclass(frozen=True)
class CardProcess:
    """A process that holds memory of a card. bytes: None where the driver does not say."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class LiveCard:
    """A card as it is now, or an instance that MIG has cut from one.

    total_bytes: all of the card, 0 where the driver does not say: of one that has no memory of its
    own and shares the host's (GB10). reserved_bytes: what the driver keeps of it, 0 where it is too
    old to say; used_bytes: what processes hold. In a container the processes may be hidden.
    instances: what MIG has cut it into, with the card's index; a process uses one of them.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    reserved_bytes: int
    used_bytes: int
    compute_capability: tuple[int, int] | None
    driver: str
    processes: tuple[CardProcess, ...]
    instances: tuple[LiveCard, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """What CUDA programs see as the card's total."""
        return self.total_bytes - self.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """What a new process could take."""
        return max(0, self.usable_bytes - self.used_bytes)


def card_order() -> dict[str, str]:
    """For the environment of a process that uses CUDA: it numbers cards as nvidia-smi and Ray do,
    unless this process's environment says otherwise. By itself CUDA begins with the fastest, where
    they are not alike.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def live_cards() -> tuple[LiveCard, ...]:
    """All cards of this machine; () where NVIDIA's driver is not installed.

    Raises PlimsollError when NVML is there and fails: a driver that does not work.
    """
    import pynvml  # not before a machine is looked at: it is a large file

    found: Future[tuple[LiveCard, ...]] = Future()

    def read() -> None:
        try:
            found.set_result(_read(pynvml))
        except BaseException as error:  # noqa: BLE001 (handed over)
            found.set_exception(error)

    Thread(target=read, daemon=True).start()  # which does not keep a process from its end
    try:
        return found.result(_PATIENCE)
    except TimeoutError as error:
        raise _failed(f"no answer within {_PATIENCE:g} s") from error
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        raise _failed(str(error)) from error


def visible_cards(cards: Sequence[LiveCard], visible: str | None) -> tuple[LiveCard, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets a process see; all where it is None.

    As CUDA does, a list of indices or UUIDs (or their beginnings), of cards or of MIG's instances
    of them, counts up to its first wrong entry. Indices are nvidia-smi's; see `card_order`. An
    instance stands for its card where it is named, or the only one, and its bytes are told.
    """
    if visible is None:
        return tuple(_cut(card, card.instances) for card in cards)
    seen: list[LiveCard] = []
    for entry in visible.split(","):
        word = entry.strip()
        match = [found for card in cards if (found := _meant(card, word)) is not None]
        if len(match) != 1:
            break
        seen.append(match[0])
    return tuple(seen)


def own_cards() -> tuple[LiveCard, ...]:
    """The cards that CUDA programs of this process may use. Raises as `live_cards`."""
    return visible_cards(live_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))


class BusyMeter:
    """What NVML samples of a card, about six times a second: whether something computed there.

    nvml: the module pynvml. since: microseconds since 1970 from which the first reading counts.
    """

    def __init__(self, nvml: Any, uuid: str, since: int) -> None:
        self._nvml = nvml
        self._read_to = since
        try:
            nvml.nvmlInit()
            self._card = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:  # no driver, or an instance of MIG, which has no samples
            self._card = None

    def read(self) -> float | None:
        """Return the share of the samples since the last reading in which the card was busy; None
        where there are none."""
        if self._card is None:
            return None
        ask = self._nvml.nvmlDeviceGetSamples
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            _, samples = ask(self._card, kind, self._read_to)
        except self._nvml.NVMLError:
            return None
        new = [one for one in samples if one.timeStamp > self._read_to]
        if not new:
            return None
        self._read_to = max(one.timeStamp for one in new)
        percents: list[int] = [one.sampleValue.uiVal for one in new]
        return sum(percents) / len(percents) / 100


@cache
def busy_meter(uuid: str) -> BusyMeter:
    """Return this process's meter of a card. uuid: as NVML has it, such as `GPU-36e8ca5a-...`."""
    import pynvml

    return BusyMeter(pynvml, uuid, time.time_ns() // 1000)


def _meant(card: LiveCard, word: str) -> LiveCard | None:
    """The card, or the instance of it, that an entry of CUDA_VISIBLE_DEVICES means."""
    if word == str(card.index) or (word and card.uuid.startswith(word)):
        return _cut(card, card.instances)
    named = [one for one in card.instances if word and one.uuid.startswith(word)]
    return _cut(card, named) if named else None


def _cut(card: LiveCard, instances: Sequence[LiveCard]) -> LiveCard:
    """The instance, where it is the only one and its bytes are told; else the card."""
    return instances[0] if len(instances) == 1 and instances[0].total_bytes else card


def _failed(why: str) -> PlimsollError:
    return PlimsollError(
        f"nvidia-smi does not work: {why}. The driver is not loaded or does not fit its tools: "
        f"load or install it again, and restart the machine after an update."
    )


def _read(nvml: Any) -> tuple[LiveCard, ...]:
    nvml.nvmlInit()
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(_card(nvml, handle, index, driver) for index, handle in enumerate(handles))
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, handle: Any, index: int, driver: str) -> LiveCard:
    whole = _device(nvml, handle, index, driver)
    capability = _told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    parts = (
        replace(_device(nvml, part, index, driver), compute_capability=capability)
        for part in _parts(nvml, handle)
    )
    return replace(whole, compute_capability=capability, instances=tuple(parts))


def _parts(nvml: Any, handle: Any) -> Iterator[Any]:
    """The handles of the instances that MIG has cut a card into."""
    if (_told(nvml, nvml.nvmlDeviceGetMigMode, handle) or [0])[0]:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            part = _told(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None:
                yield part


def _device(nvml: Any, handle: Any, index: int, driver: str) -> LiveCard:
    """A card, or an instance of one."""
    ask = nvml.nvmlDeviceGetMemoryInfo
    # Drivers before 510 know the first form alone, which does not tell what they keep.
    memory = _told(nvml, ask, handle, nvml.nvmlMemory_v2) or _told(nvml, ask, handle)
    total, free = (memory.total, memory.free) if memory is not None else (0, 0)
    reserved = getattr(memory, "reserved", 0)
    running = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return LiveCard(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=total,
        reserved_bytes=reserved,
        used_bytes=total - reserved - free,
        compute_capability=None,
        driver=driver,
        processes=tuple(_process(nvml, one.pid, one.usedGpuMemory) for one in running),
    )


def _process(nvml: Any, pid: int, held: int | None) -> CardProcess:
    try:
        name = _told(nvml, nvml.nvmlSystemGetProcessName, pid)
    except UnicodeDecodeError:
        name = None
    return CardProcess(pid, name or "[Not Found]", held)  # which is what nvidia-smi says


def _told(nvml: Any, ask: Callable[..., Any], *given: Any) -> Any:
    """The answer; None where the card, the driver or the process's rights do not allow one."""
    try:
        return ask(*given)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None
