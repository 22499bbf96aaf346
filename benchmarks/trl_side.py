"""One training run by TRL, for against_trl.py, which starts it in a process of its own.

    python benchmarks/trl_side.py JOB MODEL ROWS.json SETTINGS.json

Prints one JSON line: the seconds from the first optimizer step's begin to the last one's end, and
the loss of each step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time of the optimizer steps, without what comes before and after them."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.end = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.end = time.perf_counter()


TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "rm": (RewardTrainer, RewardConfig),
}


def main(job: str, model: str, rows: str, settings: str) -> None:
    trainer_type, config_type = TRAINERS[job]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = config_type(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            gradient_checkpointing=False,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **json.loads(settings),
        )
        trainer = trainer_type(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(json.loads(Path(rows).read_text())),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"seconds": clock.end - clock.begin, "losses": losses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
