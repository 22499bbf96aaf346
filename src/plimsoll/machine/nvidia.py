"""The GPUs of this machine and what sits on them, as nvidia-smi tells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.errors import PlimsollError

_MIB = 2**20
_CARD_FIELDS = (
    "index,uuid,name,memory.total,memory.reserved,memory.used,compute_cap,driver_version,"
    "mig.mode.current"
)
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_PATIENCE = 30.0  # seconds; a sick driver lets nvidia-smi hang


@dataclass(frozen=True)
class CardProcess:
    """A process that holds memory of a card. bytes: None where the driver does not say."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class LiveCard:
    """A card as it is now.

    total_bytes: all of the card, 0 where the driver does not say: of one that has no memory of its
    own and shares the host's (GB10). reserved_bytes: what the driver keeps of it, 0 where it is too
    old to say; used_bytes: what processes hold. In a container the processes may be hidden.
    instances: the UUIDs of the parts that MIG has cut it into; a process uses one of them, whose
    bytes are not told.
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
    instances: tuple[str, ...] = ()

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
    """All cards of this machine; () where there is no nvidia-smi.

    Raises PlimsollError when nvidia-smi fails: a driver that does not work.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    processes = [_process(row) for row in _query("compute-apps", _PROCESS_FIELDS)]
    rows = _query("gpu", _CARD_FIELDS)
    instances = _instances() if any(row[-1] == "Enabled" for row in rows) else {}
    return tuple(_card(row, processes, instances) for row in rows)


def visible_cards(cards: Sequence[LiveCard], visible: str | None) -> tuple[LiveCard, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets a process see; all where it is None.

    As CUDA does, a list of indices or UUIDs (or their beginnings), of cards or of MIG's instances
    of them, counts up to its first wrong entry. Indices are nvidia-smi's; see `card_order`.
    """
    if visible is None:
        return tuple(cards)
    seen: list[LiveCard] = []
    for entry in visible.split(","):
        word = entry.strip()
        match = [c for c in cards if _is_meant(c, word)]
        if len(match) != 1:
            break
        seen.append(match[0])
    return tuple(seen)


def own_cards() -> tuple[LiveCard, ...]:
    """The cards that CUDA programs of this process may use. Raises as `live_cards`."""
    return visible_cards(live_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _is_meant(card: LiveCard, word: str) -> bool:
    names = (card.uuid, *card.instances)
    return word == str(card.index) or (word != "" and any(n.startswith(word) for n in names))


def _query(what: str, fields: str) -> list[list[str]]:
    rows = _ask(f"--query-{what}={fields}", "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in row.split(", ")] for row in rows if row]


def _instances() -> dict[str, tuple[str, ...]]:
    """The UUIDs of MIG's instances of each card, by the card's."""
    found: dict[str, tuple[str, ...]] = {}
    card = ""
    for uuid in re.findall(r"\(UUID: ([^)]+)\)", "\n".join(_ask("-L"))):
        if uuid.startswith("MIG-"):
            found[card] = (*found.get(card, ()), uuid)
        else:
            card = uuid
    return found


def _ask(*words: str) -> list[str]:
    """The lines that nvidia-smi answers."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(str(error)) from error
    if done.returncode:
        raise _failed(done.stdout.strip() or done.stderr.strip())
    return done.stdout.splitlines()


def _failed(why: str) -> PlimsollError:
    return PlimsollError(
        f"nvidia-smi does not work: {why}. The driver is not loaded or does not fit its tools: "
        f"load or install it again, and restart the machine after an update."
    )


def _card(
    row: list[str],
    processes: list[tuple[str, CardProcess]],
    instances: dict[str, tuple[str, ...]],
) -> LiveCard:
    index, uuid, name, total, reserved, used, capability, driver, _ = row
    major, _, minor = capability.partition(".")
    return LiveCard(
        index=int(index),
        uuid=uuid,
        name=name,
        total_bytes=_bytes(total) or 0,
        reserved_bytes=_bytes(reserved) or 0,
        used_bytes=_bytes(used) or 0,
        compute_capability=(int(major), int(minor)) if minor else None,
        driver=driver,
        processes=tuple(process for card, process in processes if card == uuid),
        instances=instances.get(uuid, ()),
    )


def _process(row: list[str]) -> tuple[str, CardProcess]:
    """The card's UUID and the process; a name may hold the separator."""
    return row[0], CardProcess(int(row[1]), ", ".join(row[2:-1]), _bytes(row[-1]))


def _bytes(mib: str) -> int | None:
    """None for [N/A] and [Not Supported]."""
    return int(mib) * _MIB if mib.isdigit() else None
