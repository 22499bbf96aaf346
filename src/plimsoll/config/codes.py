"""The stable code of every rule about settings and plans; docs/rules.md explains each.

A code names what is wrong, whichever rule finds it: several may share one.
"""

from __future__ import annotations

from typing import Literal, get_args

Code = Literal[
    "adamw-8bit-offload",
    "adapter-dropout",
    "adapter-separate",
    "adapter-targets",
    "best-metric",
    "best-without-eval",
    "bfloat16-card",
    "checkpointing-off",
    "critic-ema",
    "critic-ranks",
    "data-columns",
    "decay-steps",
    "device-memory",
    "disk-space",
    "four-bit-dora",
    "four-bit-offload",
    "four-bit-storage",
    "four-bit-training",
    "gradient-dtype",
    "host-memory",
    "idle-cards",
    "idle-ranks",
    "kl-in-loss",
    "kl-reference",
    "kl-target",
    "kl-unused",
    "less-than-planned",
    "local-one-process",
    "lost-updates",
    "micro-batch-tokens",
    "mini-batches",
    "more-ranks-than-gpus",
    "no-eval-data",
    "no-gpu",
    "no-jemalloc",
    "no-reward",
    "nodes-without-cluster",
    "offload-stage",
    "offload-without-gpu",
    "optimizer-value",
    "package-missing",
    "package-version",
    "reference-free-loss",
    "reference-logprobs",
    "reward-name",
    "sampling-contradicts",
    "sampling-for-training",
    "sequence-over-positions",
    "sleep-expandable-segments",
    "sleep-not-shared",
    "state-dtype",
    "tensor-parallel",
    "tensor-parallel-node",
    "text-decoder",
    "transformers-engine",
    "varlen-attention",
    "vllm-argument",
    "vllm-build",
    "vllm-cache",
    "vllm-head-size",
    "vllm-not-in-plan",
    "vllm-share",
    "vllm-share-beside-training",
    "vllm-share-not-free",
    "vocabulary",
    "warmup-too-long",
    "zero-plus-plus",
]

CODES: tuple[Code, ...] = get_args(Code)

ROOM: frozenset[Code] = frozenset(
    {
        "device-memory",
        "disk-space",
        "host-memory",
        "less-than-planned",
        "more-ranks-than-gpus",
        "no-gpu",
        "tensor-parallel-node",
        "vllm-cache",
        "vllm-share",
        "vllm-share-beside-training",
        "vllm-share-not-free",
    }
)
"""What other hardware, or less of something, would mend."""
