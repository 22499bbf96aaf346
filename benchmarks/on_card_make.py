"""What on_card.py needs a card for besides its runs, in a process of its own: its rate, and models.

    python benchmarks/on_card_make.py SETTINGS.json

Prints one JSON line. A process that has opened a card keeps memory on it until it ends.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

Settings = dict[str, Any]


def measure_rate(settings: Settings) -> Settings:
    """Return the device, its name, and the FLOPs a second of a bfloat16 matrix product on it."""
    device = settings["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": device, "name": name, "rate": matrix_rate(device)}


def matrix_rate(device: str) -> float:
    """Return the FLOPs a second of a large bfloat16 matrix product, the best of several."""
    size, rounds = (8192, 20) if device == "cuda" else (256, 2)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return rounds * 2 * size**3 / min(seconds() for _ in range(5))


def write_model(settings: Settings) -> Settings:
    """Write a random model and the tokenizer of digits; return nothing."""
    from transformers import AutoModelForCausalLM

    from plimsoll.commands.demo import make_tokenizer
    from plimsoll.model.tiny import tiny_config

    config = tiny_config("qwen2", settings["tied"], **settings["shape"])
    tokenizer = make_tokenizer()
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    with torch.device(settings["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(settings["path"], max_shard_size="4GB")
    tokenizer.save_pretrained(settings["path"])
    return {}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"rate": measure_rate, "model": write_model}[asked["make"]](asked)))
