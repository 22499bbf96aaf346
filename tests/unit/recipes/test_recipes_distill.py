"""A teacher must have the student's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.config.jobs import DistillConfig
from plimsoll.config.load import load_config
from plimsoll.errors import ConfigError
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.recipes.arithmetic import make_tokenizer
from plimsoll.recipes.distill import check_tokenizers


def config(home: Path, vocabulary: int) -> DistillConfig:
    for name, rows in (("student", 32), ("teacher", vocabulary)):
        write_tiny_model(home / name, tiny_config("llama", True, vocab=rows), 0, make_tokenizer())
    path = home / "distill.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"directory": "out", "steps": 1},
                "data": {"train": {"path": "x", "prompt": "q", "response": "a"}},
                "actor": {"model": {"path": str(home / "student")}},
                "teacher": {"model": {"path": str(home / "teacher")}},
            }
        )
    )
    return load_config(DistillConfig, str(path))


def test_rows_beyond_the_tokenizer_are_padding(tmp_path: Path) -> None:
    check_tokenizers(config(tmp_path, 40))


def test_a_smaller_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary is 24, and the actor's .* is 32"):
        check_tokenizers(config(tmp_path, 24))


def test_another_tokenizer_is_refused_by_its_first_differing_token(tmp_path: Path) -> None:
    wrong = config(tmp_path, 32)
    file = tmp_path / "teacher" / "tokenizer.json"
    vocabulary = make_tokenizer().get_vocab()
    second = min(token for text, token in vocabulary.items() if text.isdigit())
    [text] = [text for text, token in vocabulary.items() if token == second]
    file.write_text(file.read_text().replace(f'"{text}": {second}', f'"x": {second}'))
    with pytest.raises(ConfigError, match=rf"2 entries differ, the first of them token {second}"):
        check_tokenizers(wrong)
