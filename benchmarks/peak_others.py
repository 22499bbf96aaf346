"""What others would have predicted for a published row: DeepSpeed's estimators, the closed form."""

from __future__ import annotations

from peak_rows import Row
from peak_states import trained_parameters


def deepspeed_estimate(row: Row) -> float:
    """States only. DeepSpeed 0.19.8, `estimate_zero2_model_states_mem_needs` (zero/
    stage_1_and_2.py) and `estimate_zero3_model_states_mem_needs` (zero/stage3.py), without offload;
    FSDP counts as stage 3, one GPU as stage 2. They know neither adapters nor 4 bits.
    """
    shape = row.shape
    if row.strategy in ("zero3", "fsdp"):
        layer = shape.linear_parameters // shape.layers
        largest = max(layer, shape.embedding_parameters)
        return 4 * largest + 18 * shape.parameters / row.ranks
    ranks = row.ranks if row.strategy.startswith("zero") else 1
    return 2 * shape.parameters + 18 * shape.parameters / ranks


def closed_form(row: Row) -> float:
    """What people work out by hand: 16 bytes a trained parameter and 2 a frozen one (0.5 in 4
    bits), divided where sharded; 2 s b h a layer with recomputation, else 34 s b h; logits once in
    fp32, or one chunk of them.
    """
    shape, trained = row.shape, trained_parameters(row)
    base = 0.5 if row.quantization in ("nf4", "nf4 twice", "gptq") else 2
    frozen = base * shape.parameters if row.adapter else 0
    ranks = row.ranks if row.strategy in ("zero3", "fsdp") else 1
    layer = 2 if row.checkpointed else 34
    activations = layer * row.tokens * shape.hidden * shape.layers
    logits = 4 * min(row.chunk or row.tokens, row.tokens) * shape.vocabulary
    return (16 * trained + frozen) / ranks + activations + logits
