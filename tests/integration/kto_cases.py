"""Labelled responses and pairs to learn from, and `plimsoll kto` and `dpo` on them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from commands import write_config, write_task

from plimsoll.cli import main
from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model

BETA, UNDESIRABLE = 0.5, 1.5
SEQUENCES, STEPS, RATE = 5, 4, 0.003
KTO: dict[str, Any] = {
    "run": {"directory": "kto", "steps": STEPS, "eval_every": STEPS, "tensorboard": False},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "q", "response": "a", "label": "good"},
        "eval": {"path": "pairs.jsonl", "prompt": "q", "chosen": "a", "rejected": "b"},
        "chat_template": "none",
        "max_tokens": 16,
        "shuffle": False,
    },
    "batch": {"sequences": SEQUENCES, "micro_batch_tokens": 64},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": RATE, "eps": 1e-4, "weight_decay": 0.1},
    },
    "reference": {"model": {"path": "other", "dtype": "float32"}},
    "algorithm": {"loss": {"options": {"beta": BETA, "undesirable_weight": UNDESIRABLE}}},
}
PRECOMPUTE = ("--reference_logprobs.precompute", "true")
PAIRS = (
    *("--data.train.path", "pairs.jsonl", "--data.train.response", "null"),
    *("--data.train.label", "null", "--data.train.chosen", "a", "--data.train.rejected", "b"),
)


def write_labelled(home: Path) -> None:
    """A model, another one for the reference, rows with two neighbours of one prompt, and pairs."""
    write_task(home)
    shape = tiny_config("qwen2", True, vocab=32, hidden=64, heads=2, feed_forward=96)
    shape.initializer_range = 0.1
    write_tiny_model(home / "other", shape, 7, make_tokenizer())
    questions = [f"{i}+{i * 7 % 10}{'=' * (1 + i % 3)}" for i in range(10)]
    questions[3] = questions[2]
    rows = [
        {"q": questions[i % 10], "a": f" {i * i}#{i}", "good": (True, 1, False, 0)[i * 3 % 4]}
        for i in range(SEQUENCES * STEPS)
    ]
    pairs = [{"q": row["q"], "a": row["a"], "b": f"#{row['a']}"} for row in rows[::2]]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_config(home, "kto", KTO)
    batch = {"pairs": 3, "micro_batch_tokens": 64}
    write_config(home, "dpo", {**KTO, "batch": batch, "algorithm": {}})
    adapted = {**KTO["actor"], "adapter": {"rank": 4}}
    write_config(home, "adapted", {**KTO, "actor": adapted, "reference": None})


def train_here(
    home: Path, directory: str, *flags: str, job: str = "kto", config: str = "kto"
) -> int:
    """Run the job in this process; its exit code."""
    with contextlib.chdir(home):
        return main([job, f"{config}.yaml", "--run.directory", directory, *flags])
