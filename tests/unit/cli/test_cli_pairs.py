"""`plimsoll dpo` before it loads anything: help, dry run, and inputs that cannot work."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from told_problems import read_problems

from plimsoll.cli import main

CONFIG = """\
# dpo
run: {directory: runs/one, steps: 3}
cluster: {where: local, threads: 1}
data: {train: {path: rows.jsonl.gz, chosen: a, rejected: b}, max_tokens: 32}
batch: {pairs: 4, micro_batch_tokens: 64}
actor: {model: {path: model}}
"""
ROW = b'{"a": "\\n\\nHuman: x\\n\\nAssistant: y", "b": "\\n\\nHuman: x\\n\\nAssistant: z"}\n'


@pytest.fixture(autouse=True)
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with all that a run needs."""
    monkeypatch.chdir(tmp_path)
    for name, positions in (("model", 64), ("short", 16)):
        model = tmp_path / name
        model.mkdir()
        shape = {"model_type": "qwen2", "max_position_embeddings": positions}
        (model / "config.json").write_text(json.dumps(shape))
        (model / "tokenizer.json").write_text("{}")
        (model / "chat_template.jinja").write_text("{{ messages }}")
        save_file({"w": np.zeros((2, 3), dtype=np.float32)}, model / "model.safetensors")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(ROW))
    (tmp_path / "dpo.yaml").write_text(CONFIG)
    (tmp_path / "free_of_reference.py").write_text("def mine(inputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """(exit code, all that was printed)."""
    code = main(["dpo", "dpo.yaml", "--dry-run", *flags])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_dry_run_shows_pairs_and_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = dry_run(capsys)
    assert code == 0, text
    rows = [line.strip() for line in text.splitlines()]
    assert "actor model (bfloat16, ZeRO stage 2)" in rows
    assert "reference (the actor's first weights)" in rows
    assert re.search(r"^  pairs +4, .* 32 tokens", text, re.MULTILINE)
    assert re.search(r"^  of the run +3 steps, 12 pairs$", text, re.MULTILINE)


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo", "free_of_reference:mine"])
def test_a_reference_free_loss_has_no_reference(
    loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--algorithm.loss.name={loss}", "--algorithm.loss.options={}"]
    code, text = dry_run(capsys, *flags)
    assert code == 0 and "reference (" not in text
    code, text = dry_run(capsys, *flags, "--reference.model.path=model")
    assert code == 4
    [problem] = read_problems(text)
    assert (problem.key, problem.code) == ("reference", "reference-free-loss")
    assert f" {loss} " in problem.why


def test_a_reference_of_its_own_is_shown_and_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--reference.model.path=model", "--reference.zero.stage=3"]
    code, text = dry_run(capsys, *flags)
    assert code == 0 and re.search(r"^ +reference model \(bfloat16, divided ", text, re.MULTILINE)
    code, text = dry_run(capsys, "--reference.model.path=modle")
    [missing] = read_problems(text)
    assert (code, missing.key, missing.what) == (2, "reference.model.path", "modle")
    assert "model?" in missing.fix
    code, text = dry_run(capsys, "--reference.model.path=short")
    [too_long] = read_problems(text)
    assert (code, too_long.key, too_long.what) == (4, "reference.model.path", "short")
    assert too_long.code == "sequence-over-positions" and "16 positions" in too_long.why


def test_an_adapter_is_its_own_reference(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = dry_run(capsys, "--actor.adapter.rank=4")
    assert code == 0 and re.search(r"^ +reference \(the actor .*adapter", text, re.MULTILINE)


def test_a_misspelt_loss(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = dry_run(capsys, "--algorithm.loss.name=dop", "--reference.model.path=model")
    [problem] = read_problems(text)
    assert (code, problem.key) == (2, "algorithm.loss") and "{name: dop" in problem.what
    assert "'dpo'?" in str(problem)


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpo", "--help"]) == 0
    text = capsys.readouterr().out
    assert "plimsoll dpo CONFIG.yaml" in text and "nll_weight" in text and "rejected" in text
    assert main(["--help"]) == 0
    assert "plimsoll dpo CONFIG.yaml" in capsys.readouterr().out
