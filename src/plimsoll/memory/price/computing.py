"""From a role's config to how its forward and backward are computed."""

from __future__ import annotations

from plimsoll.config.adapter import AdapterConfig
from plimsoll.config.deepspeed import Device
from plimsoll.config.model import ModelConfig
from plimsoll.memory.price.activation_form import (
    ActivationForm,
    AdapterForm,
    Attention,
    ChunkedHead,
    Head,
    NoHead,
    ValueHead,
)
from plimsoll.memory.price.varlen import Capability, against_varlen, has_kernels
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import HeadKind


def activation_form(
    model: ModelConfig,
    adapter: AdapterConfig | None,
    shape: ModelShape,
    head: HeadKind,
    device: Device,
    entropy: bool,
    scaled: bool,
    capability: Capability | None = None,
) -> ActivationForm:
    """How a role's model is trained; parameters as those of `roles.trained_role` and `RoleWork`."""
    pair = None
    if adapter is not None:
        dropout = adapter.dropout > 0
        pair = AdapterForm(adapter.rank, adapter.targets, model.element, dropout, adapter.dora)
    return ActivationForm(
        element=model.element,
        checkpoint_every=model.checkpoint_every if model.gradient_checkpointing else None,
        attention=attention_of(model, shape, device, capability),
        head=_head(head, ChunkedHead(model.head_chunk, entropy, scaled)),
        trained=True,
        adapter=pair,
        quantized=model.quantization != "none",
        selective=model.gradient_checkpointing == "selective",
        inputs_on_host=model.activation_offload == "cpu" and device == "cuda",
        device=device,
        fused=True,
        flash=not any(against_varlen(device, capability, model.dtype, False, shape.head_dim)),
        kernels=has_kernels(capability, model.dtype),
    )


def _head(kind: HeadKind, policy: ChunkedHead) -> Head:
    match kind:
        case "policy":
            return policy
        case "value":
            return ValueHead()
        case "states":
            return NoHead()


def attention_of(
    model: ModelConfig, shape: ModelShape, device: Device, capability: Capability | None
) -> Attention:
    """With `auto` resolved, as model/load.py resolves it.

    capability: the lowest of the run's cards; None where it is not known.
    """
    if model.attention != "auto":
        return model.attention
    obstacles = against_varlen(device, capability, model.dtype, shape.softcapped, shape.head_dim)
    return "sdpa" if any(obstacles) else "varlen"
