"""Read this machine's GPUs and the processes on them with NVML, NVIDIA's management library."""

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

_TIMEOUT = 30.0  # seconds; with a broken driver NVML may hang


@dataclass(frozen=True)
class CardProcess:
    """A process that holds memory of a card."""

    pid: int
    name: str
    bytes: int | None
    """The bytes that the process holds; None if the driver does not report them."""


@dataclass(frozen=True)
class LiveCard:
    """The present state of a card, or of a MIG instance of a card."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    """All memory of the card; 0 if the driver does not report it, for example for cards that share
    the host's memory (GB10).
    """
    reserved_bytes: int
    """The bytes that the driver reserves; 0 if the driver is too old to report them."""
    used_bytes: int
    """The bytes that processes hold."""
    compute_capability: tuple[int, int] | None
    driver: str
    processes: tuple[CardProcess, ...]
    """The processes on the card. In a container they may be hidden."""
    instances: tuple[LiveCard, ...] = ()
    """The MIG instances of the card, with the card's index. A process uses one of them."""

    @property
    def usable_bytes(self) -> int:
        """The total that CUDA programs see."""
        return self.total_bytes - self.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that a new process could take."""
        return max(0, self.usable_bytes - self.used_bytes)


def card_order() -> dict[str, str]:
    """Return the environment variable that makes CUDA number cards as nvidia-smi and Ray do.

    It is empty if this process's environment sets the order. By default CUDA puts the fastest card
    first.
    """
    return {} if "CUDA_DEVICE_ORDER" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def live_cards() -> tuple[LiveCard, ...]:
    """Return all cards of this machine; () if there is no driver.

    Raises PlimsollError if the driver fails or does not answer.
    """
    import pynvml  # slow to import, and needed only here

    result: Future[tuple[LiveCard, ...]] = Future()

    def read() -> None:
        try:
            result.set_result(_read(pynvml))
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            result.set_exception(error)

    Thread(target=read, daemon=True).start()  # a daemon, so that the process can end
    try:
        return result.result(_TIMEOUT)
    except TimeoutError as error:
        raise _driver_error(f"no answer within {_TIMEOUT:g} s") from error
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        raise _driver_error(str(error)) from error


def visible_cards(cards: Sequence[LiveCard], visible: str | None) -> tuple[LiveCard, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES lets a process see; all if it is None.

    The list has indices or UUIDs (or their beginnings) of cards or MIG instances. As in CUDA, it
    ends at the first wrong entry. Indices are nvidia-smi's; see `card_order`. A MIG instance
    replaces its card if the list names the instance, or the card has no other, and if its bytes are
    known.
    """
    if visible is None:
        return tuple(_single_instance(card, card.instances) for card in cards)
    seen: list[LiveCard] = []
    for entry in visible.split(","):
        word = entry.strip()
        matches = [match for card in cards if (match := _match_entry(card, word)) is not None]
        if len(matches) != 1:
            break
        seen.append(matches[0])
    return tuple(seen)


def complete_uuids(cards: Sequence[LiveCard], visible: str) -> str:
    """Return a CUDA_VISIBLE_DEVICES with whole UUIDs in the place of their beginnings.

    CUDA takes the beginning of a UUID, and NVML does not.
    """
    uuids = [part.uuid for card in cards for part in (card, *card.instances)]

    def complete(word: str) -> str:
        matches = [uuid for uuid in uuids if uuid.startswith(word) and not word.isdigit()]
        return matches[0] if len(matches) == 1 else word

    return ",".join(complete(word.strip()) for word in visible.split(","))


def own_cards() -> tuple[LiveCard, ...]:
    """Return the cards that this process may use with CUDA. Raises the error of `live_cards`."""
    return visible_cards(live_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))


class BusyMeter:
    """Measures the share of time that a card computes. NVML takes about six samples a second."""

    def __init__(self, nvml: Any, uuid: str, since: int) -> None:
        """Start the meter of a card; samples before `since` (microseconds) do not count."""
        self._nvml = nvml
        self._read_to = since
        try:
            nvml.nvmlInit()
            self._card = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:  # no driver, or a MIG instance, which has no samples
            self._card = None

    def read(self) -> float | None:
        """Return the busy share (0 to 1) since the last reading; None if there are no samples."""
        if self._card is None:
            return None
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        try:
            _, samples = self._nvml.nvmlDeviceGetSamples(self._card, kind, self._read_to)
        except self._nvml.NVMLError:
            return None
        new = [sample for sample in samples if sample.timeStamp > self._read_to]
        if not new:
            return None
        self._read_to = max(sample.timeStamp for sample in new)
        percents: list[int] = [sample.sampleValue.uiVal for sample in new]
        return sum(percents) / len(percents) / 100


@cache
def busy_meter(uuid: str) -> BusyMeter:
    """Return this process's meter of a card. NVML's UUIDs look like `GPU-36e8ca5a-...`."""
    import pynvml

    return BusyMeter(pynvml, uuid, time.time_ns() // 1000)


def _match_entry(card: LiveCard, word: str) -> LiveCard | None:
    """Return the card, or its instance, that an entry of CUDA_VISIBLE_DEVICES names."""
    if word == str(card.index) or (word and card.uuid.startswith(word)):
        return _single_instance(card, card.instances)
    named = [part for part in card.instances if word and part.uuid.startswith(word)]
    return _single_instance(card, named) if named else None


def _single_instance(card: LiveCard, instances: Sequence[LiveCard]) -> LiveCard:
    return instances[0] if len(instances) == 1 and instances[0].total_bytes else card


def _driver_error(why: str) -> PlimsollError:
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
    capability = _query(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    parts = (
        replace(_device(nvml, part, index, driver), compute_capability=capability)
        for part in _instance_handles(nvml, handle)
    )
    return replace(whole, compute_capability=capability, instances=tuple(parts))


def _instance_handles(nvml: Any, handle: Any) -> Iterator[Any]:
    if (_query(nvml, nvml.nvmlDeviceGetMigMode, handle) or [0])[0]:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            part = _query(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None:
                yield part


def _device(nvml: Any, handle: Any, index: int, driver: str) -> LiveCard:
    """Return a card, or a MIG instance, without its compute capability."""
    read = nvml.nvmlDeviceGetMemoryInfo
    # Drivers before 510 know only the first form, which lacks the reserved bytes.
    memory = _query(nvml, read, handle, nvml.nvmlMemory_v2) or _query(nvml, read, handle)
    total, free = (memory.total, memory.free) if memory is not None else (0, 0)
    reserved = getattr(memory, "reserved", 0)
    running = _query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return LiveCard(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=total,
        reserved_bytes=reserved,
        used_bytes=total - reserved - free,
        compute_capability=None,
        driver=driver,
        processes=tuple(_process(nvml, process.pid, process.usedGpuMemory) for process in running),
    )


def _process(nvml: Any, pid: int, held: int | None) -> CardProcess:
    try:
        name = _query(nvml, nvml.nvmlSystemGetProcessName, pid)
    except UnicodeDecodeError:
        name = None
    return CardProcess(pid, name or "[Not Found]", held)  # as nvidia-smi writes it


def _query(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML function; None if card, driver or permissions forbid it."""
    try:
        return function(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None
