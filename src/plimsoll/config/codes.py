"""The stable code of every rule about settings and plans; docs/rules.md explains each.

A code names what is wrong, whichever file finds it: two files may share one.
"""

from __future__ import annotations

from typing import Literal, get_args

SettingCode = Literal[
    "adamw-8bit-offload",
    "adapter-dropout",
    "adapter-separate",
    "adapter-targets",
    "best-metric",
    "best-without-eval",
    "checkpointing-off",
    "critic-ranks",
    "critic-ema",
    "data-columns",
    "decay-steps",
    "four-bit-dora",
    "four-bit-offload",
    "four-bit-training",
    "gradient-dtype",
    "kl-in-loss",
    "kl-reference",
    "kl-target",
    "kl-unused",
    "local-one-process",
    "micro-batch-tokens",
    "mini-batches",
    "no-eval-data",
    "no-reward",
    "nodes-without-cluster",
    "offload-stage",
    "optimizer-value",
    "package-missing",
    "reference-free-loss",
    "reference-logprobs",
    "reward-name",
    "sampling-for-training",
    "sequence-over-positions",
    "sleep-not-shared",
    "state-dtype",
    "tensor-parallel",
    "transformers-engine",
    "vllm-head-size",
    "warmup-too-long",
    "zero-plus-plus",
]
"""Of what a config says, or a config beside its models' config.json."""

PlanCode = Literal[
    "adapter-targets",
    "bfloat16-card",
    "device-memory",
    "disk-space",
    "four-bit-storage",
    "host-memory",
    "idle-cards",
    "idle-ranks",
    "less-than-planned",
    "lost-updates",
    "more-ranks-than-gpus",
    "no-gpu",
    "no-jemalloc",
    "nodes-without-cluster",
    "offload-without-gpu",
    "package-version",
    "sequence-over-positions",
    "sleep-expandable-segments",
    "tensor-parallel",
    "tensor-parallel-node",
    "text-decoder",
    "varlen-attention",
    "vllm-build",
    "vllm-cache",
    "vllm-head-size",
    "vllm-share",
    "vllm-share-beside-training",
    "vllm-share-not-free",
    "vocabulary",
    "zero-plus-plus",
]
"""Of what a config needs beside its hardware, its models' shapes and the machine at hand."""

CODES: frozenset[str] = frozenset((*get_args(SettingCode), *get_args(PlanCode)))
"""All of them."""
