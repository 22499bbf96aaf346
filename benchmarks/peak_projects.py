"""What the projects that published peaks do where a row does not say it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Project:
    """What a project's code does where a row does not say it.

    deepspeed: strategy `single` still runs DeepSpeed ZeRO-2 where all weights are trained, or
    where they are quantised. bucket: elements of its DeepSpeed buckets. auto_buckets: at stage 3
    they follow the hidden size. dropout: of adapters.
    routed_copies: bf16 copies of every routed row of a mixture of experts that its own code makes
    besides those of transformers, and as many more where experts have adapters.
    packed_qkv: its attention computes queries, keys and values as one, whose values stay a part of
    it, and repeats the keys and values of groups.
    untied: its own model code keeps embedding and head apart where they are tied.
    fused_gelu: an MLP without a gate keeps its first result alone, where transformers' keeps four.
    logit: bytes of each where the loss is highest. transformers' Llama until 4.44 has fp32 logits,
    what the loss reads of them, and its log-softmax. holds_output: its loop keeps the model's
    output, and so its logits, until the backward is done; Trainer's does not. output_at_step: and
    until the next forward. wide_output: its logits are fp32. cached: its layers are checkpointed
    from without, so that the model does not know it and keeps keys and values as it does to
    generate. in_place: as `logit`, where the loss makes the gradient in place of fp32 logits and of
    what it reads of them.
    prepares: 4 and 8 bits by PEFT's preparation, which makes fp32 of what is not in them.
    reentrant: its checkpoints are, so that FSDP, which waits for the gradient of what frozen
    weights read, keeps every checkpoint and its gradient until the backward ends.
    quantized_inputs: its bitsandbytes (0.41) keeps the input of every 4-bit linear.
    flat_gradients: its FSDP makes one parameter of each block, frozen weights and all, so that its
    gradient is as large; whole on each rank until the step, where gradients are accumulated.
    late_zero: its loop drops the gradients of a step after the next forward.
    liger: norms and MLPs are Liger's.
    in_parts: norms, attention and MLP of a layer are checkpointed one by one.
    reference_adapter: a frozen one is kept beside that which is trained.
    low_level_zero: its ZeRO-1 and 2 are Colossal-AI's (peak_colossal.py), not DeepSpeed's.
    """

    deepspeed: bool = False
    bucket: int = 500_000_000
    auto_buckets: bool = False
    dropout: bool = False
    routed_copies: tuple[int, int] = (0, 0)
    packed_qkv: bool = False
    untied: bool = False
    fused_gelu: bool = False
    logit: int = 12
    holds_output: bool = False
    output_at_step: bool = False
    wide_output: bool = False
    cached: bool = False
    in_place: int = 8
    prepares: bool = True
    reentrant: bool = False
    quantized_inputs: bool = False
    flat_gradients: bool = False
    late_zero: bool = False
    liger: bool = False
    in_parts: bool = False
    reference_adapter: bool = False
    low_level_zero: bool = False


PROJECTS = {
    # finetune.py, finetune/*.sh and ds_config_zero2.json
    "QwenLM/Qwen": Project(deepspeed=True, bucket=200_000_000, dropout=True),
    # trainer/models/layers/moe.py, after torchtitan: gathered, padded, permuted and unpermuted
    # rows, and an fp32 product with the scores; multi_moe.py: each adapter's result beside them
    "PrimeIntellect-ai/prime-rl": Project(routed_copies=(6, 2), logit=16),
    # finetune/lora.py and full.py (no_backward_sync), lit_gpt/model.py, utils.py:
    # chunked_cross_entropy; bitsandbytes 0.41.1, autograd/_functions.py: MatMul4Bit
    "Lightning-AI/litgpt": Project(
        dropout=True,
        packed_qkv=True,
        untied=True,
        fused_gelu=True,
        logit=8,
        quantized_inputs=True,
        flat_gradients=True,
    ),
    # litgpt/model.py and api.py: LLM.forward; lightning/pytorch/loops/optimization/automatic.py:
    # Closure.closure
    "Lightning-AI/pytorch-lightning": Project(
        packed_qkv=True, untied=True, fused_gelu=True, logit=8, late_zero=True
    ),
    # thunder/benchmarks/benchmark_litgpt.py: LitGPT's models, and a loss of their 16-bit logits
    # that its loop keeps
    "Lightning-AI/lightning-thunder": Project(
        packed_qkv=True, untied=True, fused_gelu=True, logit=6, holds_output=True
    ),
    # swift/llm/utils/argument.py: lora_dropout_p
    "modelscope/ms-swift": Project(dropout=True),
    # train.py: lora_dropout, reentrant_checkpointing
    "AnswerDotAI/fsdp_qlora": Project(dropout=True, reentrant=True),
    # scripts/measure.py: one_step
    "Anassbzdd/fitcheck": Project(holds_output=True),
    # src/kernels/liger/cross_entropy.py, of the fp32 copy that transformers 5 makes of its logits
    "whitecircle/halo": Project(in_place=6),
    # src/models/*.py: a loss of the model's own 16-bit logits; src/trainer/trainer.py: epoch_train
    "ljm565/universal-llm-trainer": Project(logit=6, holds_output=True, reentrant=True),
    # atorch/examples/llama2/fsdp_llama2.py, with transformers 4.31: fp32 logits
    "intelligent-machine-learning/dlrover": Project(
        holds_output=True, wide_output=True, cached=True
    ),
    # llama_finetuning.py of July 2023, with transformers 4.31; what it held is in the rows
    "meta-llama/llama-cookbook": Project(wide_output=True, cached=True),
    # model/model_utils/checkpointing.py: prepare_model_for_training; examples/deepspeed
    "hiyouga/LLaMA-Factory": Project(auto_buckets=True, prepares=False, reentrant=True),
    # utils/models.py: "converting modules to %s for flash attention", after PEFT's preparation;
    # deepspeed_configs
    "axolotl-ai-cloud/axolotl": Project(auto_buckets=True, prepares=False),
    # algorithms/core/base.py
    "AgileRL/AgileRL": Project(reference_adapter=True),
    # _transformers/auto_model.py: use_liger_kernel; components/distributed/parallelizer.py:
    # checkpoint_wrapper; recipes/llm/train_ft.py: out = model(**batch)
    "NVIDIA-NeMo/Automodel": Project(liger=True, in_parts=True, holds_output=True),
    # coati/trainer/*.py: outputs = self.model(...), with transformers' fp32 logits;
    # colossalai/booster/plugin/low_level_zero_plugin.py: reduce_bucket_size_in_m
    "hpcaitech/ColossalAI": Project(
        bucket=12 * 2**20,
        holds_output=True,
        output_at_step=True,
        wide_output=True,
        low_level_zero=True,
    ),
    # transformers' Trainer
    "foundation-model-stack/fms-acceleration": Project(reentrant=True),
}

_NAMES = {
    r"lit-?gpt.*lightning(?:'s)? trainer": "Lightning-AI/pytorch-lightning",
    r"lit-?gpt|lit-?llama": "Lightning-AI/litgpt",
    r"colossal-?(?:ai|chat)|\bcoati\b": "hpcaitech/ColossalAI",
    r"llama-?factory": "hiyouga/LLaMA-Factory",
    r"\bms-?swift\b": "modelscope/ms-swift",
    r"axolotl": "axolotl-ai-cloud/axolotl",
    r"fsdp_qlora": "AnswerDotAI/fsdp_qlora",
    r"nemo automodel": "NVIDIA-NeMo/Automodel",
}
"""Of frameworks, in texts about runs of others'."""


def framework(source: str, said: str) -> str:
    """The key of the project that a row was run with: its source, or whom its text names."""
    if source in PROJECTS:
        return source
    return next((key for name, key in _NAMES.items() if re.search(name, said)), source)
