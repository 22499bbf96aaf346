"""How fast machines are: what one rank can do in a second."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.machine.hardware import Node

UTILISATION = 0.4
"""Of a card's peak: 38 to 44 % were reached at 7B to 65B (PaLM, Chowdhery et al. 2022, table 3;
Llama, Touvron et al. 2023, section 2.4)."""
PCIE = 25e9
"""Bytes a second and card, one direction: what copies reach of PCIe 4.0 x16's 32 GB/s."""
HOST_MEMORY = 200e9
"""Bytes a second of a node: half of the peak of 16 channels of DDR4-3200 (two sockets)."""
NETWORK = 50e9
"""Bytes a second between nodes, of each: 400 Gb/s, as AWS gives p4d machines."""
CPU_FLOPS, CPU_MEMORY = 1e12, 50e9
"""Of a rank without a card: bf16 products on two cores with AMX, and two channels of memory."""


@dataclass(frozen=True)
class Rates:
    """What one rank can do in a second.

    flops: of matrix products, as they are reached. memory: bytes of the card's. link: bytes to the
    other ranks of its group. pcie: bytes to the host. host: bytes of its part of host memory.
    """

    flops: float
    memory: float
    link: float
    pcie: float
    host: float


def rates_of(node: Node, ranks: int, nodes: int) -> Rates:
    """ranks: of a group. nodes: that it is spread over."""
    sharing = max(1, ranks // nodes)
    host = HOST_MEMORY / sharing
    if not node.cards:
        return Rates(CPU_FLOPS, CPU_MEMORY / sharing, CPU_MEMORY / sharing, host, host)
    card = node.cards[0]
    link = card.link_bandwidth if nodes == 1 else min(card.link_bandwidth, NETWORK)
    return Rates(UTILISATION * card.bf16_flops, card.memory_bandwidth, link, PCIE, host)
