"""Leave an optimizer step of DeepSpeed that failed amid a forward or backward pass.

DeepSpeed 0.19.8 expects every pass to come to its end. One that fails leaves gradients in the
buckets to be reduced, gradients that are added up already, weights that are being gathered
(stage 3), and counters of its hooks. All of it is put back to where it is before the first
micro-batch of a step, which is then done anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

_COLLECTIVES = re.compile(r"all_(gather|reduce|to_all)|barrier|broadcast|gather|reduce|scatter")
"""What the names of DeepSpeed's collectives begin with (deepspeed/comm/torch.py)."""


class _Guarded:
    """DeepSpeed's communication backend, with a block around each of its collectives."""

    def __init__(self, backend: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._backend = backend
        self._around = around

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if not _COLLECTIVES.match(name):
            return attribute

        def guarded(*arguments: object, **options: object) -> Any:
            with self._around():
                return attribute(*arguments, **options)

        return guarded


@contextmanager
def guard_collectives(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """During the block, run every collective of DeepSpeed inside a block of `around`.

    All of them pass through one object (deepspeed/comm/comm.py, `cdb`). Modules whose forward pass
    is cut short are taken off DeepSpeed's stack of them.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    backend, depth = comm.cdb, len(FWD_MODULE_STACK)
    comm.cdb = _Guarded(backend, around)
    try:
        yield
    finally:
        comm.cdb = backend
        del FWD_MODULE_STACK[depth:]


def abandon_step(module: nn.Module, optimizer: Any, stage: int) -> None:
    """Drop all gradients of the step; weights and states stay. All ranks must call it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # gradients that are being reduced on another stream
    hooks = getattr(optimizer, "_backward_hook_state", None)
    if hooks is not None:
        hooks.reset_for_new_step()
        hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
    if stage == 3:
        _abandon_stage_3(module, optimizer)
    elif hasattr(optimizer, "ipg_buckets"):
        _abandon_stages_1_and_2(optimizer)
    module.zero_grad()  # first: on a CPU, DeepSpeed's own cannot drop a gradient (stage3.py)
    optimizer.zero_grad()


def _abandon_stages_1_and_2(optimizer: Any) -> None:
    """Empty the buckets and drop what was reduced (zero/stage_1_and_2.py)."""
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    # At this count the next backward pass overwrites what the last one left on the host.
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
    optimizer.all_grad_tensors = dict.fromkeys(optimizer.all_grad_tensors)
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()


def _abandon_stage_3(module: nn.Module, optimizer: Any) -> None:
    """Empty the buckets, divide all weights again and forget the traced order of modules.

    The order is traced anew, because a rank that has come further knows more of it.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    optimizer._offload_boundary_param_ids = set()
    offload = optimizer.parameter_offload
    # A copy: what a module releases is cached by the coordinator, and ranks have got unequally far.
    coordinator = offload.param_coordinator = copy(offload.param_coordinator)
    coordinator.release_backward_leftovers()
    coordinator._clean_inflight_param_registry()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        if parameter.ds_status == ZeroParamStatus.INFLIGHT:  # marked so before it was asked for
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            parameter.data = parameter.data.new_empty(0)
    parts: list[Any] = list(module.modules())
    for part in parts:
        if hasattr(part, "ds_recompute_parameters"):
            part.ds_recompute_parameters.clear()
        if hasattr(part._parameters, "_in_forward"):
            part._parameters._in_forward = False
        if hasattr(part, "_external_params"):  # of other modules, as it was seen to use them
            part._external_params.clear()
        if "applied_pre_backward_ref_cnt" in vars(part):
            part.applied_pre_backward_ref_cnt = 0
    offload.empty_partition_cache()
