"""What an evaluation is refused for before it measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.evaluate import run_eval
from plimsoll.commands.found_models import FoundModel
from plimsoll.errors import PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.model.tiny import tiny_config, write_tiny_model


def test_where_nothing_can_be_written_is_told_before_the_model_is_measured(tmp_path: Path) -> None:
    config, rows = tmp_path / "sft.yaml", tmp_path / "rows.jsonl"
    rows.write_text("{}\n")  # a bad row, which is met later
    model = tiny_config("qwen2", True, vocab=32, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(tmp_path / "model", model, 0, make_tokenizer())
    config.write_text(
        f"# sft\nrun: {{directory: {tmp_path}, steps: 1}}\n"
        f"actor: {{model: {{path: {tmp_path}/model}}}}\n"
        f"data: {{train: {{path: {rows}, text: t}}, eval: {{path: {rows}, text: t}}}}\n"
    )
    found = FoundModel(str(tmp_path), load_any(str(config)), rows / "out")
    with pytest.raises(PlimsollError, match=r"Cannot write .*rows\.jsonl/out: "):
        run_eval(found)
    with pytest.raises(PlimsollError, match="Cannot write /sys: "):  # not even by root
        run_eval(replace(found, directory=Path("/sys")))
