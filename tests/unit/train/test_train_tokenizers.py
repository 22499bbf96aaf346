"""All roles must have the tokens of the actor's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.run import JobConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs.distill import DistillConfig
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.which import job_of
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.resolve.load import load_spec
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.train import tokenizers

ENTRIES = make_tokenizer().get_vocab()
DIGIT = min(token for text, token in ENTRIES.items() if text.isdigit())
[TEXT] = [text for text, token in ENTRIES.items() if token == DIGIT]


def written(home: Path, job: type[JobConfig], role: str, rows: int) -> RunSpec[Any]:
    """Return a job whose actor has 32 rows, and another role with this many."""
    for name, vocabulary in (("actor", 32), (role, rows)):
        model = tiny_config("llama", True, vocab=vocabulary)
        write_tiny_model(home / name, model, 0, make_tokenizer())
    columns = ["prompt", "response"] if job is DistillConfig else ["prompt", "chosen", "rejected"]
    path = home / "job.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"directory": "out", "steps": 1},
                "data": {"train": {"path": "x", **{column: column for column in columns}}},
                "actor": {"model": {"path": str(home / "actor")}},
                role: {"model": {"path": str(home / role)}},
            }
        )
    )
    return load_spec(job_of(job), str(path))


def check_tokenizers(spec: RunSpec[Any]) -> None:
    tokenizers.check_tokenizers(spec.actor.model, spec.roles.values())


def teacher(home: Path, rows: int) -> RunSpec[Any]:
    return written(home, DistillConfig, "teacher", rows)


def reference(home: Path, rows: int) -> RunSpec[Any]:
    return written(home, DpoConfig, "reference", rows)


def rename(directory: Path, text: str, token: int) -> None:
    """Give a token of a saved tokenizer another text."""
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"{TEXT}": {token}', f'"{text}": {token}'))


def test_rows_beyond_the_tokenizer_are_padding(tmp_path: Path) -> None:
    check_tokenizers(teacher(tmp_path, 40))


def test_a_teacher_with_a_smaller_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary.* 24\b.* actor.* 32\b"):
        check_tokenizers(teacher(tmp_path, 24))


@pytest.mark.parametrize("role", ["teacher", "reference"])
def test_another_tokenizer_is_refused_by_its_first_differing_token(
    tmp_path: Path, role: str
) -> None:
    wrong = {"teacher": teacher, "reference": reference}[role](tmp_path, 32)
    rename(tmp_path / role, "x", DIGIT)
    with pytest.raises(ConfigError, match=rf"{role}.*the first of them token {DIGIT} \('.'\)"):
        check_tokenizers(wrong)


def test_a_reference_may_lack_rows_of_padding_alone(tmp_path: Path) -> None:
    check_tokenizers(reference(tmp_path, max(ENTRIES.values()) + 1))


def test_a_reference_without_a_row_for_a_token_is_refused(tmp_path: Path) -> None:
    last = max(ENTRIES.values())
    smaller = reference(tmp_path, 32)
    file = tmp_path / "reference" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": last}))
    with pytest.raises(ConfigError, match=rf"vocabulary is {last}, .* has the token {last} "):
        check_tokenizers(smaller)


def test_a_reference_without_tokenizer_is_held_against_its_rows_alone(tmp_path: Path) -> None:
    bare = reference(tmp_path, 32)
    for file in (tmp_path / "reference").glob("token*"):
        file.unlink()
    check_tokenizers(bare)
