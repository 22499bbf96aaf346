"""`plimsoll kto` before it loads anything: help, dry run, and inputs that cannot work; and a
reference that scores before the actor is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from told_problems import read_problems

from plimsoll.cli import main

KTO = """\
# kto
run: {directory: runs/one, steps: 3}
cluster: {where: local, threads: 1}
data: {train: {path: rows.jsonl, prompt: q, response: a, label: good}, max_tokens: 32}
batch: {sequences: 4, micro_batch_tokens: 64}
actor: {model: {path: model}}
"""


@pytest.fixture(autouse=True)
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with all that a run needs."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "qwen2", "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros((2, 3), dtype=np.float32)}, model / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text('{"q": "x", "a": "y", "b": "z", "good": true}\n')
    (tmp_path / "kto.yaml").write_text(KTO)
    pairs = KTO.replace("# kto", "# dpo").replace("sequences: 4", "pairs: 2")
    pairs = pairs.replace("response: a, label: good", "chosen: a, rejected: b")
    (tmp_path / "dpo.yaml").write_text(pairs)
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *flags: str, job: str = "kto") -> tuple[int, str]:
    """(exit code, all that was printed)."""
    code = main([job, f"{job}.yaml", "--dry-run", *flags])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_dry_run_shows_sequences_and_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = dry_run(capsys)
    assert code == 0, text
    assert "reference (the actor's first weights)\n" in text
    assert re.search(r"^  sequences +4, .* 32 tokens: 128 ", text, re.MULTILINE)


@pytest.mark.parametrize("job", ["kto", "dpo"])
@pytest.mark.parametrize("adapter", [(), ("--actor.adapter.rank=4",)])
def test_a_reference_that_scores_before_is_shown_so(
    job: str, adapter: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--reference_logprobs.precompute=true", *adapter)
    code, text = dry_run(capsys, *flags, job=job)
    assert code == 0, text
    assert re.search(r"^ +reference \(the actor's .*, before ", text, re.MULTILINE)
    code, text = dry_run(capsys, *flags, "--reference.model.path=model", job=job)
    assert code == 0, text
    assert re.search(r"^ +reference model \(.*\), before ", text, re.MULTILINE)


def test_a_loss_without_a_reference_has_nothing_to_score_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--algorithm.loss.name=simpo", "--algorithm.loss.options={}")
    code, text = dry_run(capsys, *flags, "--reference_logprobs.precompute=true", job="dpo")
    assert code == 4
    [problem] = read_problems(text)
    assert (problem.key, problem.what) == ("reference_logprobs.precompute", "true")
    assert problem.code == "reference-free-loss" and " simpo " in problem.why


def test_a_misspelt_loss_and_a_missing_reference(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--algorithm.loss.name=kot", "--reference.model.path=modle")
    code, text = dry_run(capsys, *flags)
    assert code == 2
    found = {problem.key: str(problem) for problem in read_problems(text)}
    assert found.keys() == {"algorithm.loss", "reference.model.path"}
    assert "'kto'?" in found["algorithm.loss"] and "model?" in found["reference.model.path"]


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kto", "--help"]) == 0
    text = capsys.readouterr().out
    assert "plimsoll kto CONFIG.yaml" in text and "precompute" in text and "label" in text
    assert main(["--help"]) == 0
    assert "plimsoll kto CONFIG.yaml" in capsys.readouterr().out
