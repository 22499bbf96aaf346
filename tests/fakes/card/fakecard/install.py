"""Replace torch's names by the card's.

Everything that is tied to one version of torch is here and in `cpp/`. Names with an underscore are
private to torch 2.13: another version may have others, and then fails where they are used.
"""

from __future__ import annotations

import os
from collections import namedtuple
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fakecard import attention, memory, nccl, streams
from fakecard.control import set_capacity, stat
from fakecard.library import library
from fakecard.start import CAPACITY, CARDS

Properties = namedtuple(
    "Properties",
    "name major minor total_memory multi_processor_count uuid gcnArchName warp_size is_integrated "
    "is_multi_gpu_board L2_cache_size max_threads_per_multi_processor regs_per_multiprocessor "
    "shared_memory_per_block_optin shared_memory_per_multiprocessor",
)
_kept: list[Any] = []
"""Registered kernels, which end with their library."""


def install() -> None:
    """Give torch, which was just imported, the card."""
    library().fc_devices(len(_visible()))
    set_capacity(CAPACITY)
    groups: Any = dist.distributed_c10d
    if groups.default_pg_nccl_timeout is None:  # as in a build without NCCL
        groups.default_pg_nccl_timeout = timedelta(minutes=10)
    for name, value in _replaced().items():
        place, _, attribute = name.rpartition(".")
        setattr(_find(place), attribute, value)
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_flash_attention_forward", attention.forward, "CUDA")
    kernels.impl("_flash_attention_backward", attention.backward, "CUDA")
    _kept.append(kernels)
    library().fc_takes_scalars("\n".join(sorted(_takes_scalars())).encode())


def _visible() -> list[int]:
    """Return the numbers on the machine of the cards that this process sees."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return [*range(len(CARDS))]
    uuids = [f"GPU-{card}" for card in CARDS]
    named = [word.strip() for word in words.split(",")]
    return [int(w) if w.isdigit() else uuids.index(w) for w in named if w.isdigit() or w in uuids]


def _find(place: str) -> Any:
    """Return the module or the class with this name."""
    try:
        return import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(import_module(module), name)


def _replaced() -> dict[str, Any]:
    """Return what stands for each name of torch."""
    generator = memory.generator()
    state = {
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
    }
    in_memory: dict[str, Any] = {
        "memory_allocated": lambda device=None: stat("allocated"),
        "max_memory_allocated": lambda device=None: stat("peak_allocated"),
        "memory_reserved": lambda device=None: stat("reserved"),
        "max_memory_reserved": lambda device=None: stat("peak_reserved"),
        "reset_peak_memory_stats": lambda device=None: library().fc_reset_peak(),
        "memory_stats": memory.memory_stats,
        "memory_snapshot": memory.memory_snapshot,
        "empty_cache": lambda: library().fc_empty_cache(),
        "mem_get_info": memory.mem_get_info,
        "set_per_process_memory_fraction": memory.limit_memory,
        "host_memory_stats": memory.host_memory_stats,
    }
    in_cuda: dict[str, Any] = {
        **state,
        **in_memory,
        "default_generators": (generator,),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "Stream": streams.Stream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "device": streams.Device,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "current_device": streams.index_of,
        "set_device": lambda device: library().fc_set_device(streams.index_of(device)),
        "device_count": lambda: stat("devices"),
        "is_available": lambda: stat("devices") > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": nccl.synchronize,
        "ipc_collect": memory.collect_shared,
        "cudart": memory.Runtime,
        "check_error": lambda code: None,
        "set_sync_debug_mode": lambda mode: library().fc_refuse_sync(int(mode in ("error", 2))),
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: _properties(device).name,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "nvtx": SimpleNamespace(range_push=lambda *_: 0, range_pop=lambda: 0, mark=lambda *_: None),
    }
    return {
        **{f"torch.cuda.{name}": value for name, value in in_cuda.items()},
        **{f"torch.cuda.memory.{name}": value for name, value in in_memory.items()},
        **{f"torch.cuda.random.{name}": value for name, value in state.items()},
        "torch.cuda.streams.Stream": streams.Stream,
        "torch.cuda.streams.Event": streams.Event,
        "torch.cuda.nccl.version": lambda: (2, 29, 0),
        "torch.version.cuda": "13.0",
        "torch.backends.cuda.is_built": lambda: True,
        "torch.backends.cuda.SDPAParams": lambda *parameters: parameters,
        "torch.backends.cuda.can_use_flash_attention": lambda parameters, debug=False: False,
        "torch.backends.cuda.enable_cudnn_sdp": lambda enabled: None,
        "torch._C._accelerator_setAllocatorSettings": memory.set_allocator,
        "torch._C._cuda_getCurrentRawStream": lambda device: library().fc_get_stream(),
        "torch._C._cuda_getDeviceCount": lambda: stat("devices"),
        "torch._C._cuda_isCurrentStreamCapturing": lambda: False,
        "torch.UntypedStorage.resize_": memory.resize_storage,
        "torch.UntypedStorage.clone": memory.clone_storage,
        "torch.UntypedStorage._share_cuda_": memory.share_storage,
        "torch.UntypedStorage._new_shared_cuda": staticmethod(memory.open_storage),
        "torch.UntypedStorage._release_ipc_counter_cuda": staticmethod(memory.release_reader),
        "torch.distributed.is_nccl_available": lambda: True,
        "torch.distributed.ProcessGroupNCCL": nccl.ProcessGroupNCCL,
        "torch.distributed.distributed_c10d._NCCL_AVAILABLE": True,
        "torch.distributed.distributed_c10d.is_nccl_available": lambda: True,
        "torch.distributed.distributed_c10d.ProcessGroupNCCL": nccl.ProcessGroupNCCL,
    }


def _properties(device: Any = None) -> Properties:
    card = CARDS[_visible()[streams.index_of(device)]]
    sizes = 50 << 20, 2048, 65536, 232448, 233472
    return Properties(
        "card of host memory", 9, 0, stat("capacity"), 132, card, "", 32, False, False, *sizes
    )


def _takes_scalars() -> set[str]:
    """Return the operations that take a CPU scalar beside the card's tensors.

    CUDA's wrappers check no devices there: NoCheck, or an iterator, in native_functions.yaml.
    """
    folder = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native"
    names, name = set(), ""
    for line in (folder / "native_functions.yaml").read_text().splitlines():
        if line.startswith("- func: "):
            name = line.removeprefix("- func: ").partition("(")[0]
        elif line.strip().startswith(
            ("device_check: NoCheck", "structured_inherits: TensorIteratorBase")
        ):
            names.add(f"aten::{name}")
    return names
