"""Describe the machine that a run is planned for: known cards, given ones, or this machine's.

Usable bytes are what `torch.cuda.get_device_properties(0).total_memory` and the "total capacity" of
PyTorch's out-of-memory errors say: nvidia-smi's total without what the driver reserves. They differ
by up to a per cent between drivers. The smallest figure found is taken, and the thread or logs with
that figure are its source.

Speeds are of NVIDIA's data sheets: dense bf16 with fp32 accumulation, and one direction of NVLink
(of the SXM form, if there are two) or of PCIe to a neighbour. Cards below compute capability 8.0
have no bf16 units. Their speed is the fp32 rate, at which PyTorch then computes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from plimsoll.errors import ConfigError
from plimsoll.machine.host import live_host, usable_cores
from plimsoll.machine.nvidia import LiveCard, own_cards
from plimsoll.machine.versions import has_cuda_build
from plimsoll.run.numbers import plural

_MOST_BYTES = 2**60
_CARD_BYTES = range(10**9, 2**40)  # other sizes have a missing or wrong unit
_MOST_CARDS, _MOST_NODES = 64, 100_000

_MIB, _GIB = 2**20, 2**30

BFLOAT16_UNITS = (8, 0)
"""The lowest compute capability of cards that multiply bfloat16 and run flash attention."""

# Words of a card's name that choose nothing. (The PCIe forms of A100 and H100 are slower.)
_NOISE = re.compile(
    r"(nvidia|geforce|tesla|rtx|sxm\d?|pcie|hbm\d?e?|gb?|gib|generation|edition"
    r"|blackwell|workstation|server|max|q)?"
)


@dataclass(frozen=True)
class Card:
    """A GPU."""

    name: str
    usable_bytes: int
    """The total memory as CUDA programs see it."""
    nominal_bytes: int
    """The memory in the card's name, in binary units."""
    compute_capability: tuple[int, int] | None
    """The compute capability; None if it is unknown."""
    bf16_flops: float
    """Dense bf16 operations a second."""
    memory_bandwidth: float
    """Bytes a second between the card and its memory."""
    link_bandwidth: float
    """Bytes a second to a neighbour, in one direction."""
    source: str
    """The source of `usable_bytes`."""


@dataclass(frozen=True)
class Node:
    """One machine."""

    cards: tuple[Card, ...]
    """Its cards; () if a run uses the CPU alone."""
    host_bytes: int | None
    """The host's memory; None if it is unknown, so that the plan cannot check it."""
    cuda_build: bool = False
    """Whether the machine's torch is built for CUDA, like the one on PyPI. Such a build takes more
    memory, also on CPU.
    """
    cores: int | None = None
    """The number of cores that a process may use; None if unknown."""


@dataclass(frozen=True)
class Hardware:
    """The machines of a run: equal ones, at least one."""

    node: Node
    nodes: int = 1
    """The number of machines."""

    @property
    def cards(self) -> int:
        """The number of cards of all nodes."""
        return self.nodes * len(self.node.cards)


def _card(
    name: str,
    mib: int,
    nominal_gib: int,
    capability: tuple[int, int],
    speeds: tuple[float, float, float],
    source: str,
) -> Card:
    """Return a shipped card. `speeds` are TFLOP/s, GB/s of memory, and GB/s of the link."""
    tflops, memory, link = speeds
    sizes = mib * _MIB, nominal_gib * _GIB
    return Card(name, *sizes, capability, tflops * 1e12, memory * 1e9, link * 1e9, source)


# Name, MiB, GiB by name, capability, (TFLOP/s, GB/s of memory, GB/s of the link), source of the
# MiB: "logs" are those of public repositories, where no thread was found.
CARDS: tuple[Card, ...] = (
    _card("A100-40GB", 40_339, 40, (8, 0), (312, 1555, 300), "bottlerocket-os/bottlerocket#3873"),
    _card("A100-80GB", 81_049, 80, (8, 0), (312, 2039, 300), "vllm-project/vllm#4408"),
    _card("A800-80GB", 81_049, 80, (8, 0), (312, 2039, 200), "logs: 81,051 MiB; as the A100"),
    _card("A30", 24_094, 24, (8, 0), (165, 933, 32), "google/RB-Modulation#5"),
    _card("H100-80GB", 81_008, 80, (9, 0), (989, 3350, 450), "vllm-project/vllm#27508"),
    _card("H800-80GB", 81_008, 80, (9, 0), (989, 3350, 200), "logs: as the H100 by nvidia-smi"),
    _card("H20", 97_280, 96, (9, 0), (148, 4000, 450), "logs: 95.00 to 95.1 GiB, 97,285 MiB"),
    _card("H200", 143_073, 141, (9, 0), (989, 4800, 450), "logs: 139.72 to 139.81 GiB"),
    _card("B200", 182_630, 180, (10, 0), (2250, 7700, 900), "pytorch/ao#4002"),
    _card("L40S", 45_486, 48, (8, 9), (362, 864, 32), "stepfun-ai/Step-Video-T2V#8"),
    _card("L40", 45_465, 48, (8, 9), (181, 864, 32), "QwenLM/Qwen3-VL#2097"),
    _card("L4", 22_563, 24, (8, 9), (121, 300, 32), "AgileRL/AgileRL, memory/fixtures"),
    _card("A10", 22_587, 24, (8, 6), (125, 600, 32), "logs: an A10G, 24 GB by the same driver"),
    _card("A10G", 22_587, 24, (8, 6), (70, 600, 32), "logs: as the A10"),
    _card("A40", 45_416, 48, (8, 6), (150, 696, 32), "logs: 45,416 MiB to 44.42 GiB, with ECC"),
    _card("A6000", 48_670, 48, (8, 6), (155, 768, 32), "logs: 47.53 to 47.54 GiB"),
    _card("A5000", 24_248, 24, (8, 6), (111, 768, 32), "zai-org/GLM-4#730, without ECC"),
    _card("A4000", 15_984, 16, (8, 6), (77, 448, 32), "DengKaiCQ/VGGT-Long#6"),
    _card("RTX6000Ada", 48_520, 48, (8, 9), (364, 960, 32), "logs: 48,520 MiB, without ECC"),
    _card("RTXPRO6000", 97_249, 96, (12, 0), (504, 1792, 64), "antirez/ds4#431"),
    _card("RTX2080Ti", 11_012, 11, (7, 5), (13.4, 616, 16), "logs: 11,012 to 11,020 MiB"),
    _card("RTX3060", 11_910, 12, (8, 6), (26, 360, 32), "logs: 11,910 to 12,045 MiB"),
    _card("RTX3080-10GB", 10_002, 10, (8, 6), (60, 760, 32), "logs: 10,002 to 10,014 MiB"),
    _card("RTX3080-12GB", 12_117, 12, (8, 6), (61, 912, 32), "logs: 12,117 MiB"),
    _card("RTX3090", 24_064, 24, (8, 6), (71, 936, 32), "XChenZ/havatar#6"),
    _card("RTX4070", 11_994, 12, (8, 9), (58, 504, 32), "logs: 11,994 to 12,002 MiB"),
    _card("RTX4080", 15_944, 16, (8, 9), (97, 717, 32), "logs: a 4080 SUPER, 15,944 MiB"),
    _card("RTX4080SUPER", 15_944, 16, (8, 9), (104, 736, 32), "logs: 15,944 MiB"),
    _card("RTX4090", 24_084, 24, (8, 9), (165, 1008, 32), "Soul-AILab/SoulX-FlashTalk#5"),
    _card("RTX5080", 15_840, 16, (12, 0), (113, 960, 64), "logs: 15,840 to 15,851 MiB"),
    _card("RTX5090", 32_117, 32, (12, 0), (209, 1792, 64), "aikitoria/open-gpu-kernel-modules#1"),
    _card("V100-16GB", 16_128, 16, (7, 0), (15.7, 900, 150), "logs: 15.75 to 15.78 GiB"),
    _card("V100-32GB", 32_491, 32, (7, 0), (15.7, 900, 150), "logs: 31.73 to 31.74 GiB"),
    _card("T4", 14_909, 16, (7, 5), (8.1, 320, 16), "Zheng-Chong/CatVTON#133"),
)
_BY_NAME = {card.name: card for card in CARDS}

_OTHER_MAKERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("AMD", re.compile(r"amd|instinct|radeon|\b(mi\d{2,3}[a-z]?|(rx|w)-?[5-9]\d{3}\w*)\b")),
    ("Intel", re.compile(r"intel|gaudi|\b(hl-?\d{3}|arc|(gpu-?)?max-?1[15][05]0|ponte)\b")),
    ("Google", re.compile(r"tpu|trillium|ironwood|\bv([2-4]|5e|5p|5lite|5litepod|6e|7x)\b")),
)
"""Makers other than NVIDIA, with patterns of their cards' names."""


def find_card(name: str) -> Card:
    """Return the shipped card of a name: `A100-80GB`, `a100 80g`, `NVIDIA H100 80GB HBM3`, `4090`.

    Raises ConfigError, with the nearest names, if it is unknown, fits two cards, or is not
    NVIDIA's.
    """
    matches = _matches(name)
    if len(matches) == 1:
        return matches[0]
    if maker := _other_maker(name):
        raise ConfigError(
            f"{name!r} is made by {maker}, and not supported: Plimsoll runs on NVIDIA's GPUs, by "
            f"CUDA, and on CPU. Known: {', '.join(_BY_NAME)}, and cpu."
        )
    if matches:
        both = " or ".join(card.name for card in matches)
        raise ConfigError(f"The card {name!r} is made with more than one size. Write {both}.")
    folded = {_fold(known): known for known in _BY_NAME}
    folded |= {_model_and_size(known)[0]: known for known in _BY_NAME}  # without the size
    close = [folded[match] for match in difflib.get_close_matches(_fold(name), folded, n=2)]
    near = f" Did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
    raise ConfigError(
        f"No card is called {name!r}.{near} Known: {', '.join(_BY_NAME)}, and cpu. Any other card "
        f"is given by its bytes, such as 24GB or 22.5GiB."
    )


def _other_maker(name: str) -> str | None:
    words = re.sub(r"[\s_]+", "-", name.lower())
    return next((maker for maker, known in _OTHER_MAKERS if known.search(words)), None)


def known_card(name: str) -> Card | None:
    """Return the shipped card with the driver's name of a card; None if there is none."""
    matches = _matches(name)
    return matches[0] if len(matches) == 1 else None


def card_by_bytes(name: str, usable_bytes: int, source: str) -> Card:
    """Return a card of which only the memory is known; its speeds are those of an A100."""
    a100 = _BY_NAME["A100-80GB"]
    speeds = a100.bf16_flops, a100.memory_bandwidth, a100.link_bandwidth
    return Card(name, usable_bytes, usable_bytes, None, *speeds, source)


def _matches(name: str) -> list[Card]:
    model, size = _model_and_size(name)
    return [
        card
        for card in CARDS
        if _model_and_size(card.name)[0] == model and size in (None, card.nominal_bytes // _GIB)
    ]


def _model_and_size(name: str) -> tuple[str, int | None]:
    """Return ("a100", 80) for `NVIDIA A100-SXM4-80GB`, ("4090", None) for `RTX4090`."""
    words = [word.removeprefix("rtx") for word in re.split(r"[^a-z0-9]+", name.lower())]
    words = [word for word in words if not _NOISE.fullmatch(word)]
    sizes = {word for word in words[1:] if re.fullmatch(r"\d{1,3}(gb?|gib)?", word)}
    model = "".join(word for word in words if word not in sizes)
    return model, int(re.sub(r"\D", "", sizes.pop())) if len(sizes) == 1 else None


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def parse_bytes(text: str) -> int:
    """Return the bytes in a text such as `1TB` (decimal), `512GiB` (binary) or `900e9`.

    Raises ConfigError for other texts.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([kmgtp]?)(i?)b?", text.strip().lower())
    base = 1024 if match and match[3] else 1000
    size = float(match[1]) * base ** " kmgtp".index(match[2] or " ") if match else 0.0
    if not 1 <= size <= _MOST_BYTES:
        raise ConfigError(
            f"{text!r} is no amount of memory. Write a number above 0 with a unit: 80GB and 1TB "
            f"are decimal, 512GiB is binary, 900e9 is bytes; at most 1 EiB."
        )
    return int(size)


def parse_cluster(text: str, nodes: int, host_memory: int | None) -> Hardware:
    """Return `nodes` equal machines that a user describes.

    `text` has the cards of each machine, such as `8xA100-80GB`, `8 H100`, `H100` (one card),
    `4x24GB` (usable bytes of an unknown card), or `cpu`. Raises ConfigError if a card is unknown,
    or a count is one that no cluster has.
    """
    if not 1 <= nodes <= _MOST_NODES:
        raise ConfigError(f"The number of machines is {nodes}; give one from 1 to {_MOST_NODES:,}.")
    if host_memory is not None and host_memory <= 0:
        raise ConfigError(f"The host memory is {host_memory} bytes. Give more than 0, or nothing.")
    return Hardware(Node(_parse_cards(text), host_memory), nodes)


def live_machine() -> Node:
    """Return this machine, with the GPUs and the memory that this process may use.

    The memory is at most the cgroup's limit. Raises ConfigError if MIG has divided a GPU into
    several instances, or the driver does not report a GPU's bytes; PlimsollError if the driver
    fails.
    """
    cards = own_cards()
    divided = next((card for card in cards if card.instances), None)
    if divided is not None:
        raise ConfigError(
            f"MIG has divided GPU {divided.index} into "
            f"{plural(len(divided.instances), 'instance')}, and nvidia-smi does not tell the "
            "bytes of the one that a run would get. Write them as cluster.hardware (--cluster), "
            "such as 9.5GiB: `python -c 'import torch; print(torch.cuda.mem_get_info()[1])'` says "
            "how many there are."
        )
    unsized = next((card for card in cards if not card.total_bytes), None)
    if unsized is not None:
        raise ConfigError(
            f"nvidia-smi does not tell the bytes of GPU {unsized.index} ({unsized.name}), as of "
            "one that shares the host's memory. Write as cluster.hardware (--cluster), such as "
            "90GiB, how many a run may fill, with room for what its processes hold on the host."
        )
    return _node(cards)


def find_machine() -> Node:
    """Return this machine, like `live_machine`, but refuse no GPU.

    A GPU that MIG has divided counts as one GPU with all its memory. A GPU whose bytes the driver
    does not report has 0 bytes.
    """
    return _node(own_cards())


def _node(cards: tuple[LiveCard, ...]) -> Node:
    host = live_host().capacity_bytes
    return Node(tuple(map(_card_from_driver, cards)), host, has_cuda_build(), usable_cores())


_COUNTED = re.compile(r"\s*([-+]?[\d.,]+(?:e[-+]?\d+)?)\s*[x×*]\s*(.*)", re.IGNORECASE)
_SPACED = re.compile(r"\s*(\d{1,2})\s+(?!(?:[kmgtp]i?b?|b)\s*$|\d+\s*[kmgtp])(.+)", re.IGNORECASE)
"""A count, a space and a card. A number with a unit of bytes does not match: cards have names of
three or four digits.
"""


def _parse_cards(text: str) -> tuple[Card, ...]:
    match = _COUNTED.fullmatch(text) or _SPACED.fullmatch(text)
    count, name = (match[1], match[2].strip()) if match else ("1", text.strip())
    if name.lower() == "cpu" and count == "1":
        return ()
    not_one_kind = name.lower() == "cpu" or re.search(r"^\d+\s*[x×*]|,", name, re.IGNORECASE)
    if not_one_kind or not count.isdecimal() or not 1 <= int(count) <= _MOST_CARDS:
        raise ConfigError(
            f"{text!r} is not the cards of one machine. Give from 1 to {_MOST_CARDS} cards of one "
            "kind, such as 8xA100-80GB, or cpu; how many such machines there are is a setting of "
            "its own, cluster.nodes (--nodes)."
        )
    return (_parse_card(name),) * int(count)


def _parse_card(name: str) -> Card:
    amount = r"[-+\d.]+(e\+?\d+|\s*[kmgp]i?b?|\s*t(i?b)?|\s*b)"  # "2080 Ti" is no amount
    if not re.fullmatch(amount, name, re.IGNORECASE):
        return find_card(name)
    size = parse_bytes(name)
    if size not in _CARD_BYTES:
        raise ConfigError(f"{name!r} is {size:,} bytes, which no GPU has. Write such as 24GB.")
    return card_by_bytes(name, size, "given by hand")


def _card_from_driver(live: LiveCard) -> Card:
    """Return a card with the driver's memory, and the shipped card's speeds if it is known."""
    card = known_card(live.name) or card_by_bytes(live.name, live.usable_bytes, "")
    return replace(
        card,
        name=live.name,
        usable_bytes=live.usable_bytes,
        compute_capability=live.compute_capability or card.compute_capability,
        source="NVML: total - reserved",
    )
