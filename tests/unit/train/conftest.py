"""A current directory with a model, for sessions with real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model


@pytest.fixture
def model_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a model whose tokenizer has no chat template."""
    monkeypatch.chdir(tmp_path)
    shape = tiny_config("qwen2", True, vocab=32, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(tmp_path / "model", shape, 0, make_tokenizer())
    return tmp_path
