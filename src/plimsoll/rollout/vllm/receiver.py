"""Plimsoll's additions to vLLM's worker processes: taking new weights in place, bucket by bucket.

vLLM calls these methods in every one of its workers (`collective_rpc`). They follow vLLM's own
layer-wise reload: between begin and finish each layer is rebuilt as soon as its tensors are there.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from plimsoll.engine.memory import read_card
from plimsoll.engine.weights import SentTensor, split_bytes
from plimsoll.machine.stacks import write_stacks_when_asked
from plimsoll.rollout.sync import Arrivals


def _without_amx_attention() -> None:
    """Patch vLLM's attention on CPU to use its AVX-512 kernels in place of AMX's tiles.

    With the tiles vLLM 0.32 ends its process with an illegal instruction (tilezero, on tiles that
    nobody has configured in that thread).
    """
    from vllm.v1.attention.backends import cpu_attn

    choose = cpu_attn._get_attn_isa

    def choose_without_amx(*inputs: Any, **named: Any) -> str:
        isa: str = choose(*inputs, **named)
        return "vec" if isa == "amx" else isa

    cpu_attn._get_attn_isa = choose_without_amx


def _with_room_for_the_stage_before() -> None:
    """Patch vLLM on CPU to make a stage's input buffer when it loads the model.

    The buffer holds the output of the stage before. vLLM 0.32 makes it in the forward that warms up
    compiled code; if nothing is compiled, vLLM fails at the first batch.
    """
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_with_buffer(runner: Any, *inputs: Any, **named: Any) -> None:
        load(runner, *inputs, **named)
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )

    CPUModelRunner.load_model = load_with_buffer


# Patch vLLM at import: each worker imports this module before it chooses its kernels.
write_stacks_when_asked()
if current_platform.is_cpu():
    _without_amx_attention()
    _with_room_for_the_stage_before()


_HEADS = ("lm_head.weight", "lm_head.bias")
"""Names of a head. A tied head is sent, too, but vLLM's Gemma 2 has no head and refuses it."""


class WeightReceiver:
    """The methods that are mixed into vLLM's worker through its `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any
    model_config: Any
    device: Any
    plimsoll_arrivals: Arrivals

    def plimsoll_begin(self, names: list[str]) -> None:
        """Announce the tensors of a sync."""
        self.plimsoll_arrivals = Arrivals(tuple(names))
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model_runner.get_model())

    def plimsoll_receive(self, file: str, tensors: list[list[Any]]) -> None:
        """Load the tensors that lie one behind the other in a file in shared memory."""
        sent = [SentTensor(n, dtype, tuple(shape), size, h) for n, dtype, shape, size, h in tensors]
        # Layers keep the tensors until they are complete, and a mapping outlives its file.
        data = torch.from_file(file, size=Path(file).stat().st_size, dtype=torch.uint8)
        pieces = split_bytes(sent, data)
        for tensor in sent:
            self.plimsoll_arrivals.take(tensor, pieces[tensor.name])
        model = self.model_runner.get_model()
        headed = any(path.endswith("lm_head") for path, _ in model.named_modules())
        wanted = [name for name in pieces if headed or name not in _HEADS]
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            model.load_weights((name, pieces[name].to(self.device)) for name in wanted)

    def plimsoll_read_card(self) -> list[float | None]:
        """Return the numbers of a `CardReading`: only plain values cross to the engine."""
        return list(astuple(read_card(torch.device(self.device))))

    def plimsoll_finish(self) -> None:
        """Check that all tensors came, then put the new weights to use."""
        self.plimsoll_arrivals.complete()
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(model, self.model_config)
            if torch.device(self.device).type == "cpu":
                _pack_experts(model)


def _pack_experts(model: nn.Module) -> None:
    """Pack experts for vLLM's CPU kernel.

    vLLM 0.32 packs them at the first load alone (unquantized_fused_moe_method.py, `_setup_kernel`),
    and computes nonsense after the next.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
