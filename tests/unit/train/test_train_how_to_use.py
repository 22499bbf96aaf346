"""The commands that a run prints at its end are valid command lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.train.how_to_use import trained_text

PATH = Path("my runs/one")


def config(**model: Any) -> SftConfig:
    source = {"path": "rows.jsonl", "text": "body"}
    return SftConfig.model_validate(
        {
            "run": {"directory": str(PATH), "steps": 1},
            "data": {"train": source, "eval": source},
            "batch": {"sequences": 1, "micro_batch_tokens": 4096},
            "actor": {"model": {"path": "base", **model}, "adapter": {"rank": 4}},
        }
    )


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, []),
        ({"quantization": "nf4"}, ["--quantization", "nf4"]),
        (
            {"quantization": "nf4", "double_quantization": False, "trust_remote_code": True},
            ["--quantization", "nf4", "--no-double-quantization", "--trust-remote-code"],
        ),
    ],
)
def test_an_adapter_is_merged_into_what_it_was_trained_over(
    model: dict[str, Any], options: list[str]
) -> None:
    text = trained_text(spec_of(config(**model)), PATH, PATH / "model")
    merge, evaluate = map(shlex.split, re.findall("`(.*?)`", text))
    assert merge == ["plimsoll", "merge", "my runs/one/model", "--out", "DIRECTORY", *options]
    assert evaluate == ["plimsoll", "eval", "my runs/one", "--model", "DIRECTORY"]
