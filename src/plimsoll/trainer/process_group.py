"""The process group of the training ranks, and what must be set before DeepSpeed is imported.

In it the ranks agree that none of them has failed, before each step that they take together. A rank
that fails alone leaves the others waiting for it in the next collective. So the ranks vote before
every collective of a step that may fail, and at its end. A rank that has failed votes against once.
The vote is the next one of all the others, and they leave the step at the same place.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from plimsoll.config.cluster import DecidedExchange, Device
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.heap import keep_large_blocks
from plimsoll.machine.host import network_interface
from plimsoll.machine.local_host import user_settings
from plimsoll.machine.nvidia import own_cards
from plimsoll.sync.channel import PATIENCE, expand_segments, find_store, serve_store

_KERNEL_LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""How many prepared matrix products oneDNN and PyTorch keep on CPU: one for every shape, about 1 MB
each. Packs hardly ever have the same shape twice, and each library would keep 1,024. The layers and
sequences of one pack have about a hundred shapes."""


@dataclass(frozen=True)
class Place:
    """Where one training rank runs.

    Attributes:
        address, port: The rendezvous of rank 0.
        threads: CPU threads of the process.
        ranks_per_node: How many consecutive ranks share a node, the same number everywhere; None if
            all do.
        shards: How many consecutive ranks share packs; see model/shards.py.
        exchange: What they exchange for attention.
    """

    rank: int
    ranks: int
    address: str
    port: int
    device: Device
    threads: int
    ranks_per_node: int | None = None
    shards: int = 1
    exchange: DecidedExchange = "heads"

    @property
    def torch_device(self) -> torch.device:
        """The rank's own device: the first card that its process sees, or the CPU."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")


def check_device(device: Device) -> Device:
    """Return the device, after checking that torch can use it.

    Raises:
        ConfigError: The device is CUDA, and torch sees no CUDA GPU here.
    """
    if device == "cpu" or torch.cuda.is_available():
        return device
    what = f"cluster.device: cuda, and torch {torch.__version__} sees no CUDA GPU here"
    if cards := own_cards():
        raise ConfigError(
            f"{what}, though this machine has one ({cards[0].name}, driver {cards[0].driver}). "
            "`plimsoll doctor` says why: often the driver is too old for the CUDA that torch is "
            "built for. Mend that, or write cluster.device: cpu"
        )
    raise ConfigError(f"{what}. Write cluster.device: cpu, or install a CUDA build of torch")


def kernel_limits() -> dict[str, str]:
    """Return environment variables that limit kernel caches, for a process that computes on CPU.

    Values that this process's environment has already are kept.
    """
    return {name: os.environ.get(name, value) for name, value in _KERNEL_LIMITS.items()}


def prepare_environment(place: Place) -> None:
    """Set environment variables for DeepSpeed and PyTorch; call it before importing DeepSpeed."""
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "DS_ACCELERATOR": place.device,
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ |= kernel_limits()
    if place.device == "cpu":
        keep_large_blocks()
    for name, value in network_interface(place.address).items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(place.threads)


def join(place: Place) -> torch.device:
    """Join the process group, and return the rank's device; block until all ranks have come."""
    prepare_environment(place)
    if place.device == "cuda":
        torch.cuda.set_device(place.torch_device)
        suit_cards()
        if not user_settings():
            expand_segments(True)
    if not dist.is_initialized():
        store: Store = HashStore()  # a single rank needs no network
        if place.ranks > 1:
            meet = serve_store if place.rank == 0 else find_store
            store = meet(place.address, place.port, place.ranks)
        backend = "nccl" if place.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.ranks, timeout=PATIENCE
        )
    # DeepSpeed 0.19.8 calls functions that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    # DeepSpeed's shared-memory collectives for CPU take half a minute of g++ at first use and are
    # meant for inference; training uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if place.device == "cuda":
        accelerator = deepspeed.accelerator.get_accelerator()
        ask_cuda_for_free_memory(accelerator)
        count_ranks_as_cards(accelerator, place.ranks_per_node or place.ranks)
    deepspeed.init_distributed(dist_init_required=False)
    return place.torch_device


def ask_cuda_for_free_memory(accelerator: Any) -> None:
    """Replace DeepSpeed's query for free memory, which fails with UUIDs in CUDA_VISIBLE_DEVICES.

    DeepSpeed 0.19.8 asks NVML by the numbers in that variable: with UUIDs there, ZeRO 1 and 2 end
    with a ValueError (accelerator/cuda_accelerator.py, zero/stage_1_and_2.py).
    """
    accelerator.available_memory = lambda device=None: torch.cuda.mem_get_info(device)[0]


def count_ranks_as_cards(accelerator: Any, ranks_per_node: int) -> None:
    """Tell DeepSpeed how many ranks share a node.

    DeepSpeed 0.19.8 counts the cards that a process sees as the cards of its node (utils/groups.py,
    coalesced_collectives.py, zero/stage3.py), and a rank sees one card. So each rank would be a
    node, and gradients that are quantised between nodes would be quantised within them.
    """
    accelerator.device_count = lambda: ranks_per_node


def suit_cards() -> None:
    """Set PyTorch's process-wide settings for a process that computes on a card."""
    # cuDNN's attention, which PyTorch prefers on H100, builds a graph for each new length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # DeepSpeed makes new groups without a timeout (comm/torch.py, new_group): set the default.
    groups: Any = dist.distributed_c10d  # its types leave this attribute out
    groups.default_pg_nccl_timeout = PATIENCE


def leave() -> None:
    """Leave the process group; the process may join another."""
    if dist.is_initialized():
        import deepspeed

        # torch's function alone would leave DeepSpeed with dead groups
        deepspeed.comm.destroy_process_group()


class PeerFailed(PlimsollError):
    """Another rank has failed, so this rank leaves the step, too."""


class Vote:
    """The votes of one rank.

    A vote is a message to other ranks in each of log2(ranks) rounds, in host memory: the cards do
    not wait for it. In a round each rank passes on what it has heard to the rank that is 1, 2, 4,
    ... places further, so that all have heard of all in the end (Hensgen, Finkel and Manber 1988,
    the dissemination barrier).
    """

    def __init__(self, place: Place) -> None:
        self._rank, self._ranks = place.rank, place.ranks
        self._on_cards = place.device == "cuda"
        self._is_inside = False

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """The group of the messages, made at the first vote; None for that of all ranks.

        NCCL has no messages in host memory. A run that never votes needs no second group.
        """
        return dist.new_group(backend="gloo") if self._on_cards else None

    @property
    def is_inside(self) -> bool:
        """Whether the last collective has not ended: then the others wait in it for this rank."""
        return self._is_inside

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Vote in favour, then allow a collective in the block. Raise PeerFailed as `in_favour`."""
        self.in_favour()
        self._is_inside = True
        yield
        self._is_inside = False

    def in_favour(self) -> None:
        """Vote that this rank has not failed. Raise PeerFailed if another rank has."""
        if self._any_against(False):
            raise PeerFailed("another rank has failed in this step")

    def against(self) -> None:
        """Vote that this rank has failed."""
        self._any_against(True)

    def _any_against(self, own: bool) -> bool:
        """Return whether this rank, or one that it has heard of by now, votes against."""
        against, distance = own, 1
        while distance < self._ranks:
            sent, heard = torch.tensor(int(against)), torch.tensor(0)
            to = (self._rank + distance) % self._ranks
            source = (self._rank - distance) % self._ranks
            sending = dist.isend(sent, to, self._group)
            dist.recv(heard, source, self._group)
            assert sending is not None, "a rank that is not in the group"
            sending.wait()
            against, distance = against or bool(heard), 2 * distance
        return against
