"""One run by TRL with its fused kernels, for on_card.py, which starts it in a process of its own.

    python benchmarks/on_card_trl.py SETTINGS.json

Prints one JSON line: the seconds of each step, the tokens of a step, and the largest memory.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

Settings = dict[str, Any]


class Clock(TrainerCallback):  # type: ignore[misc]
    """The time of each step, rollouts included."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        _wait()
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self.begin)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits, as rl_rewards.py has it."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def _sft(settings: Settings) -> tuple[Any, Any, Settings, Settings]:
    more = {"train_sampling_strategy": "group_by_length", "max_length": None}
    return SFTTrainer, SFTConfig, more, {"columns": {"prompt": "prompt", "completion": "chosen"}}


def _dpo(settings: Settings) -> tuple[Any, Any, Settings, Settings]:
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    return DPOTrainer, DPOConfig, {"max_length": None}, {"columns": columns}


def _grpo(settings: Settings) -> tuple[Any, Any, Settings, Settings]:
    more = {
        "num_generations": 8,
        "beta": 0.0,
        "temperature": 1.0,
        "max_completion_length": settings["new_tokens"],
        "shuffle_dataset": False,
    }
    if not settings["cpu"]:
        more |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.45,
            "vllm_enable_sleep_mode": True,
        }
        if not settings["compiled"]:
            _have_engines_run_eagerly()
    own = {"columns": {"prompt": "prompt"}, "trainer": {"reward_funcs": digits}}
    return GRPOTrainer, GRPOConfig, more, own


def _have_engines_run_eagerly() -> None:
    """Have TRL's engines neither compile nor capture graphs, for which it has no setting."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)


JOBS: dict[str, Callable[[Settings], tuple[Any, Any, Settings, Settings]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "grpo": _grpo,
}


def main(settings: Settings) -> None:
    """Train, and print what it took."""
    trainer_type, config_type, more, own = JOBS[settings["job"]](settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    batch = settings["batch"] // (4 if settings["job"] == "dpo" else 1)
    micro = min(settings["micro"], batch)
    data = [{ours: row[theirs] for ours, theirs in own["columns"].items()} for row in rows]
    clock = Clock()
    trainer = dict(own.get("trainer", {}))
    if settings["lora"]:
        from peft import LoraConfig

        trainer["peft_config"] = LoraConfig(r=16, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        config = config_type(
            output_dir=folder,
            use_cpu=settings["cpu"],
            bf16=True,
            max_steps=settings["steps"],
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro,
            gradient_checkpointing=settings["checkpointing"],
            use_liger_kernel=not settings["cpu"] and find_spec("liger_kernel") is not None,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "bfloat16"},
            **more,
        )
        trainer_type(
            model=settings["model"],
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[clock],
            **trainer,
        ).train()
    tokens = _step_tokens(settings, data, batch)
    print(json.dumps({"seconds": clock.seconds, "tokens": tokens, "peak_bytes": _peak_bytes()}))


def _step_tokens(settings: Settings, data: list[dict[str, str]], batch: int) -> float:
    """Return the tokens of a step on the average; a digit is a token, and each response has an end.

    As in Plimsoll, each response counts its prompt, and GRPO's responses are all of full length.
    """
    columns = (sum(map(len, row.values())) for row in data)
    mean = sum(columns) / len(data)
    if settings["job"] == "grpo":
        return batch * (mean + float(settings["new_tokens"]))
    if settings["job"] == "dpo":
        prompts = sum(len(row["prompt"]) for row in data) / len(data)
        return batch * (mean + prompts + 2)
    return batch * (mean + 1)


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
