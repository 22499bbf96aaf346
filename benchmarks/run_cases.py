"""The runs that benchmarks/memory_runs.py makes: small models, generated data, and the configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import Family, tiny_config, write_tiny_model

JobName = Literal["sft", "dpo", "kto", "rm", "prm", "distill", "ppo"]
Size = Literal["3m", "30m", "120m", "300m"]
Tree = dict[str, Any]

ROWS = 192
PROMPT = 13  # tokens

_SHAPES: Mapping[Size, tuple[Family, bool, Tree]] = {
    "3m": (
        "qwen2",
        True,
        {"vocab": 4096, "hidden": 192, "heads": 6, "layers": 4, "feed_forward": 512},
    ),
    "30m": (
        "qwen2",
        True,
        {
            "vocab": 8192,
            "hidden": 512,
            "layers": 8,
            "heads": 8,
            "kv_heads": 4,
            "feed_forward": 1408,
        },
    ),
    "120m": (
        "llama",
        False,
        {
            "vocab": 32768,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "kv_heads": 4,
            "feed_forward": 2048,
        },
    ),
    "300m": (
        "qwen3",
        True,
        {
            "vocab": 32768,
            "hidden": 1024,
            "layers": 24,
            "heads": 16,
            "kv_heads": 8,
            "feed_forward": 2816,
        },
    ),
}
"""Family, whether the head is tied, and the rest of the shape."""

_BUDGETS: Mapping[Size, int] = {"3m": 4096, "30m": 1024, "120m": 512, "300m": 512}
"""Tokens of a micro-batch, unless a case says otherwise."""

_STEPS: Mapping[Size, int] = {"3m": 8, "30m": 2, "120m": 2, "300m": 2}
"""The smallest models fill what kernels and heap keep in more steps than two."""


@dataclass(frozen=True)
class RunCase:
    """A run. tokens: of a micro-batch; longest: of a sequence (or prompt and response).

    model, zero, adapter: settings of each trained role. rollout: changes to that section. prompts:
    of a step, each with two responses.
    """

    job: JobName
    size: Size
    words: str
    model: Tree = field(default_factory=dict)
    zero: Tree = field(default_factory=dict)
    adapter: Tree | None = None
    optimizer: Tree = field(default_factory=dict)
    rollout: Tree = field(default_factory=dict)
    prompts: int = 8
    ranks: int = 1
    where: Literal["local", "ray"] = "local"
    tokens: int | None = None
    longest: int = 256
    checkpoint: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.job} {self.size} {self.words}"

    @property
    def slug(self) -> str:
        """The name as a directory's."""
        return self.name.replace(" ", "-").replace(",", "")

    def config(self, home: Path) -> Tree:
        """The whole config; its files are in `home`."""
        tokens = self.tokens or _BUDGETS[self.size]
        model = {"path": str(home / f"{self.size}-{self.checkpoint}"), **self.model}
        role: Tree = {"model": model, "zero": self.zero, "optimizer": self.optimizer}
        if self.adapter is not None:
            role |= {"adapter": self.adapter}
        threads = {"threads": 1, "device": "cpu"}
        run = {"directory": str(home / self.slug), "steps": _STEPS[self.size]}
        evaluated = {"eval_every": 1} if self.job in _EVALUATED else {}
        common = {
            "run": {**run, **evaluated, "tensorboard": False},
            "cluster": {"where": self.where, "ranks": self.ranks, **threads},
            "actor": role,
        }
        return common | _JOBS[self.job](self, role, tokens, str(home / "rows.jsonl"))


def _learned(case: RunCase, tokens: int, unit: str, **data: Any) -> Tree:
    """Data of one source, and as many units of a step as fill a micro-batch of each rank, or two
    where these are sequences."""
    count = (2 if unit == "sequences" else 1) * case.ranks * tokens // case.longest
    shared = {"chat_template": "none", "max_tokens": case.longest, "over_long": "truncate"}
    return {"data": data | shared, "batch": {unit: count, "micro_batch_tokens": tokens}}


def _sft(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    source = {"path": rows, "prompt": "prompt", "response": "response"}
    return _learned(case, tokens, "sequences", train=source)


def _pairs(rows: str) -> Tree:
    return {"path": rows, "prompt": "prompt", "chosen": "response", "rejected": "rejected"}


def _dpo(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    return _learned(case, tokens, "pairs", train=_pairs(rows))


def _kto(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    return _learned(case, tokens, "sequences", train=_pairs(rows))


def _rm(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    """Evaluated, and so with a drawing of the calibration."""
    return _learned(case, tokens, "pairs", train=_pairs(rows), eval=_pairs(rows))


def _prm(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    source = {"path": rows, "prompt": "prompt", "steps": "steps", "labels": "labels"}
    return _learned(case, tokens, "sequences", train=source, eval=source)


def _distill(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    return _sft(case, role, tokens, rows) | {"teacher": {"model": role["model"]}}


def _ppo(case: RunCase, role: Tree, tokens: int, rows: str) -> Tree:
    source = {"path": rows, "prompt": "prompt", "reference": "answer"}
    sampling = {"max_new_tokens": case.longest - PROMPT}
    return {
        "data": {"train": source, "chat_template": "none", "max_tokens": PROMPT},
        "batch": {"prompts": case.prompts, "responses": 2, "micro_batch_tokens": tokens},
        "critic": role,
        "rewards": {"length": {"name": "length"}},
        "rollout": {"sampling": sampling, **(case.rollout or {"transformers": {}})},
    }


_JOBS = {
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "rm": _rm,
    "prm": _prm,
    "distill": _distill,
    "ppo": _ppo,
}
_EVALUATED = ("rm", "prm")


def write_model(home: Path, size: Size, checkpoint: Literal["bfloat16", "float32"]) -> None:
    """A random model, unless it is there; the seed is fixed."""
    directory = home / f"{size}-{checkpoint}"
    if directory.exists():
        return
    family, tied, shape = _SHAPES[size]
    config = tiny_config(family, tied, **shape)
    write_tiny_model(directory, config, 0, make_tokenizer(), getattr(torch, checkpoint))


def write_rows(path: Path) -> None:
    """Random digits in place of language: a token each. Most sequences are as long as they may be,
    so that packs are nearly full; the others are of many lengths."""
    rng = np.random.default_rng(0)

    def digits(count: int) -> str:
        return "".join(map(str, rng.integers(10, size=count)))

    rows = [
        {
            "prompt": f"{digits(PROMPT - 1)}=",
            "response": digits(int(rng.integers(200, 300))),
            "rejected": digits(int(rng.integers(200, 300))),
            "answer": "0",
            "steps": [digits(120), digits(int(rng.integers(80, 180)))],
            "labels": [True, False],
        }
        for _ in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


_LORA = {"rank": 16}
_VLLM: Tree = {"vllm": {"cpu_kv_cache_gib": 0.25, "max_sequences": 64}}
_OF_MANY_LENGTHS: Tree = {
    "vllm": {"cpu_kv_cache_gib": 0.25, "max_sequences": 256},
    "sampling": {"max_new_tokens": 256 - PROMPT, "stop": tuple("0123456789")},
}
"""A random model writes a digit every 800 tokens."""

_OFFLOAD = {"optimizer_offload": "cpu"}
_NF4 = {"quantization": "nf4"}
_SAVING = {"gradient_checkpointing": True}

CASES = (
    RunCase("sft", "3m", "ZeRO-0", zero={"stage": 0}),
    RunCase("sft", "3m", "ZeRO-2, fp32", model={"dtype": "float32"}, checkpoint="float32"),
    RunCase("sft", "30m", "ZeRO-0", zero={"stage": 0}),
    RunCase("sft", "30m", "ZeRO-2"),
    RunCase("sft", "30m", "ZeRO-3", zero={"stage": 3}),
    RunCase("sft", "30m", "ZeRO-2, fp32 files", checkpoint="float32"),
    RunCase("sft", "30m", "ZeRO-2, checkpointed", model=_SAVING, tokens=2048),
    RunCase("sft", "30m", "ZeRO-2, 2 ranks", where="ray", ranks=2),
    RunCase("sft", "120m", "ZeRO-0", zero={"stage": 0}),
    RunCase("sft", "120m", "ZeRO-2"),
    RunCase("sft", "120m", "ZeRO-2, CPU Adam", zero=_OFFLOAD),
    RunCase("sft", "120m", "ZeRO-3, CPU Adam", zero=_OFFLOAD | {"stage": 3}),
    RunCase("sft", "120m", "8-bit Adam", optimizer={"kind": "adamw_8bit"}),
    RunCase("sft", "120m", "LoRA", adapter=_LORA),
    RunCase("sft", "120m", "QLoRA", model=_NF4, adapter=_LORA),
    RunCase("sft", "120m", "ZeRO-2, 2 ranks", where="ray", ranks=2),
    RunCase("sft", "120m", "ZeRO-3, 2 ranks", zero={"stage": 3}, where="ray", ranks=2),
    RunCase(
        *("sft", "120m", "ZeRO-3, CPU Adam, 2 ranks"),
        zero=_OFFLOAD | {"stage": 3},
        where="ray",
        ranks=2,
    ),
    RunCase("sft", "300m", "ZeRO-2, checkpointed", model=_SAVING),
    RunCase("sft", "300m", "LoRA, checkpointed", model=_SAVING, adapter=_LORA),
    RunCase("sft", "300m", "QLoRA", model=_NF4 | _SAVING, adapter=_LORA),
    RunCase("dpo", "3m", "ZeRO-2"),
    RunCase("dpo", "30m", "ZeRO-2"),
    RunCase("dpo", "30m", "ZeRO-3, 2 ranks", zero={"stage": 3}, where="ray", ranks=2),
    RunCase("dpo", "120m", "ZeRO-0", zero={"stage": 0}),
    RunCase("dpo", "120m", "LoRA", adapter=_LORA),
    RunCase("dpo", "120m", "QLoRA", model=_NF4, adapter=_LORA),
    RunCase("kto", "30m", "ZeRO-2"),
    RunCase("rm", "30m", "ZeRO-2"),
    RunCase("rm", "3m", "LoRA", adapter=_LORA),
    RunCase("prm", "30m", "ZeRO-2"),
    RunCase("distill", "30m", "ZeRO-2"),
    RunCase("ppo", "3m", "transformers"),
    RunCase("ppo", "30m", "transformers"),
    RunCase("ppo", "30m", "LoRA, transformers", adapter=_LORA),
    RunCase("ppo", "3m", "vLLM, 2 ranks", where="ray", ranks=2, rollout=_VLLM),
    RunCase("ppo", "30m", "vLLM, 1 rank", where="ray", rollout=_VLLM),
    RunCase("ppo", "30m", "vLLM, many", where="ray", rollout=_OF_MANY_LENGTHS, prompts=128),
)
QUICK = ("sft 30m ZeRO-2", "sft 120m LoRA", "dpo 3m ZeRO-2", "ppo 3m transformers")
