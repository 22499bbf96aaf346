"""The smallest config of each job, as a mapping; and changes to one by dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml

QWEN = "Qwen/Qwen2.5-7B"
JOBS = ("sft", "distill", "rm", "prm", "dpo", "kto", "ppo")
COLUMNS: Mapping[str, dict[str, str]] = {
    "sft": {"prompt": "prompt", "response": "response"},
    "distill": {"prompt": "prompt", "response": "response"},
    "rm": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "prm": {"prompt": "prompt", "steps": "steps", "labels": "labels"},
    "dpo": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "kto": {"prompt": "prompt", "response": "response", "label": "good"},
    "ppo": {"prompt": "prompt", "reference": "answer"},
}


def smallest(job: str, model: str = QWEN) -> dict[str, Any]:
    """Of a job that learns from rows.jsonl."""
    config: dict[str, Any] = {
        "run": {"directory": "out", "steps": 3},
        "data": {"train": {"path": "rows.jsonl", **COLUMNS[job]}},
        "actor": {"model": {"path": model}},
    }
    if job == "distill":
        config["teacher"] = {"model": {"path": model}}
    if job == "ppo":
        config["critic"] = {"model": {"path": model}}
        config["rewards"] = {"length": {"name": "length"}}
    return config


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """changes: by dotted key; a value of None takes the key away."""
    tree = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return tree


def text(job: str, config: Mapping[str, Any]) -> str:
    """As a file, whose first line names the job."""
    return f"# {job}\n{yaml.safe_dump(dict(config), sort_keys=False)}"
