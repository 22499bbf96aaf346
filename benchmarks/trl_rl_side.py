"""One GRPO run by TRL, for rl_against_trl.py, which starts it in a process of its own.

    python benchmarks/trl_rl_side.py MODEL ROWS.json SETTINGS.json

Prints one JSON line: the seconds and the mean reward of each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time of each step, rollouts included."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.begin)


def digits(completions: list[str], **_: object) -> list[float]:
    """The share of digits, as rl_rewards.py has it."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def main(model: str, rows: str, settings: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            gradient_checkpointing=False,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            beta=0.0,
            temperature=1.0,
            num_generations=8,
            shuffle_dataset=False,
            **json.loads(settings),
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=digits,
            train_dataset=Dataset.from_list(json.loads(Path(rows).read_text())),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"seconds": clock.seconds, "rewards": rewards}))


if __name__ == "__main__":
    main(*sys.argv[1:])
