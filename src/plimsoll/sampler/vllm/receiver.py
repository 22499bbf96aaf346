"""Plimsoll's additions to vLLM's worker processes: taking new weights in place, bucket by bucket.

vLLM calls these methods in every one of its workers (`collective_rpc`). They follow vLLM's own
layer-wise reload: between begin and finish each layer is rebuilt as soon as its tensors are there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.platforms import current_platform

from plimsoll.machine.processes import write_stacks_when_asked
from plimsoll.sampler.vllm.routing import RoutingRecorder, TakenExperts
from plimsoll.sync.buckets import WeightLanding, split_bytes
from plimsoll.sync.channel import Channel, card_name
from plimsoll.trainer.memory import read_card


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
# vLLM warns at each sync of each layer that nothing came for: rotary embeddings, which have no
# weights, and layers that do not learn. `Arrivals` counts what was announced.
layerwise.logger.setLevel(logging.ERROR)


_HEADS = ("lm_head.weight", "lm_head.bias")
"""Names of a head. A tied head is sent, too, but vLLM's Gemma 2 has no head and refuses it."""


Named = tuple[str, Tensor]


class WeightReceiver:
    """The methods that are mixed into vLLM's worker through its `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any
    model_config: Any
    device: Any
    rank: int
    plimsoll_landing: WeightLanding | None = None
    plimsoll_routing: RoutingRecorder | None = None

    def plimsoll_begin(self, names: list[str], channels: list[list[Any]], first: int) -> None:
        """Announce the tensors of a sync, and the channels by which they come.

        `first` is the number of the engine's first process among those of all engines.
        """
        if self.plimsoll_landing is None:
            number, device = first + self.rank, torch.device(self.device)
            self.plimsoll_landing = WeightLanding(number, device, is_first=self.rank == 0)
        self.plimsoll_landing.begin(tuple(names), [Channel(*values) for values in channels])
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model_runner.get_model())

    def plimsoll_receive(self) -> None:
        """Load the next bucket's tensors."""
        assert self.plimsoll_landing is not None
        model = self.model_runner.get_model()
        headed = any(path.endswith("lm_head") for path, _ in model.named_modules())
        with self.plimsoll_landing.bucket() as (bucket, data):
            pieces = split_bytes(bucket.tensors, data)
            wanted = ((n, piece) for n, piece in pieces.items() if headed or n not in _HEADS)
            with set_current_vllm_config(self.vllm_config), torch.device(self.device):
                model.load_weights([*_by_loaders(model, wanted)])
            _copy_held(model, data)

    def plimsoll_card_name(self) -> str:
        """Return the name of the worker's card."""
        return card_name(torch.device(self.device))

    def plimsoll_read_card(self) -> list[float | None]:
        """Return the numbers of a `CardReading`: only plain values cross to the engine."""
        return list(astuple(read_card(torch.device(self.device))))

    def plimsoll_record_routing(self) -> None:
        """Record the experts of all tokens from now on. A second call changes nothing."""
        if self.plimsoll_routing is None:
            self.plimsoll_routing = RoutingRecorder(self.model_runner)

    def plimsoll_take_routing(self, request: str) -> TakenExperts:
        """Return the experts of the tokens of a request that has ended, and forget them."""
        assert self.plimsoll_routing is not None
        return self.plimsoll_routing.take(request)

    def plimsoll_finish(self) -> None:
        """Check that all tensors came, then put the new weights to use."""
        assert self.plimsoll_landing is not None
        self.plimsoll_landing.complete()
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            renewed = [layer for layer in model.modules() if _is_renewed(layer)]
            finalize_layerwise_reload(model, self.model_config)
            if torch.device(self.device).type == "cpu":
                _pack_experts(renewed)
        self.plimsoll_landing.close()


def _by_loaders(model: nn.Module, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the weights so that vLLM loads all by loaders, for which a reload waits.

    vLLM 0.32 copies gpt-oss's sinks and stacked experts into parameters, which are on the meta
    device during a reload, so they would be lost. A single expert it loads by a loader. The sinks
    are loaded here.
    """
    if not isinstance(model, GptOssForCausalLM):
        yield from weights
        return
    parameters = dict(model.named_parameters())
    for name, weight in weights:
        path, _, last = name.rpartition(".")
        if last == "sinks":
            sinks = parameters.get(name.replace(".self_attn.", ".attn."))
            if sinks is not None:  # of a layer in this stage of a pipeline
                first = get_tensor_model_parallel_rank() * len(sinks)
                sinks.weight_loader(sinks, weight[first : first + len(sinks)])
        elif path.endswith(".mlp.experts"):
            for expert, part in enumerate(weight):
                yield f"{path}.{expert}.{last}", part
        else:
            yield name, weight


def _copy_held(model: nn.Module, data: Tensor) -> None:
    """Copy the tensors in `data` that vLLM keeps for layers which wait for more."""
    start = data.untyped_storage().data_ptr()

    def is_inside(value: object) -> bool:
        if not isinstance(value, Tensor) or value.is_meta:
            return False
        return value.untyped_storage().data_ptr() == start

    for layer in model.modules():
        for _, bound in layerwise.get_layerwise_info(layer).loaded_weights:
            held = {name: t for name, t in bound.arguments.items() if is_inside(t)}
            bound.arguments |= {name: tensor.clone() for name, tensor in held.items()}


def _is_renewed(layer: nn.Module) -> bool:
    """Return whether tensors of a layer came in the sync that is about to end."""
    info = layerwise.get_layerwise_info(layer)
    return info.load_numel > 0 or not info.can_load()  # waiting for more, or whole already


def _pack_experts(renewed: Sequence[nn.Module]) -> None:
    """Pack experts for vLLM's CPU kernel, those of layers that are not packed already.

    vLLM 0.32 packs them at the first load alone (unquantized_fused_moe_method.py, `_setup_kernel`),
    and computes nonsense after the next.
    """
    for layer in renewed:
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
