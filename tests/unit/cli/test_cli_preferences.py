"""`plimsoll dpo` and `plimsoll kto` before they load anything: help, dry run, references and inputs
that cannot work."""

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
# {job}
run: {{directory: runs/one, steps: 3}}
cluster: {{where: local, threads: 1}}
data: {{train: {{path: rows.jsonl.gz, {columns}}}, max_tokens: 32}}
batch: {{{unit}: 4, micro_batch_tokens: 64}}
actor: {{model: {{path: model}}}}
"""
JOBS = {
    "dpo": ("pairs", "chosen: a, rejected: b"),
    "kto": ("sequences", "prompt: q, response: a, label: good"),
}
ROW = {
    "a": "\n\nHuman: x\n\nAssistant: y",
    "b": "\n\nHuman: x\n\nAssistant: z",
    "q": "x",
    "good": True,
}

Captured = pytest.CaptureFixture[str]


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
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() + b"\n"))
    for job, (unit, columns) in JOBS.items():
        text = CONFIG.format(job=job, unit=unit, columns=columns)
        (tmp_path / f"{job}.yaml").write_text(text)
    (tmp_path / "free_of_reference.py").write_text("def mine(inputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def dry_run(capsys: Captured, job: str, *flags: str) -> tuple[int, str]:
    """Return the exit code and all that was printed."""
    code = main([job, f"{job}.yaml", "--dry-run", *flags])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def rows_of(text: str) -> list[str]:
    """Return the lines of a dry run with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("job", "unit"), [("dpo", "pairs 4,.* 32 tokens"), ("kto", "sequences 4,.* 32 tokens: 128 ")]
)
def test_a_dry_run_shows_what_a_step_sees_and_the_reference(
    job: str, unit: str, capsys: Captured
) -> None:
    code, text = dry_run(capsys, job)
    assert code == 0, text
    rows = rows_of(text)
    assert "actor model (bfloat16, ZeRO stage 2)" in rows
    assert "reference (the actor's first weights)" in rows
    assert any(re.match(unit, row) for row in rows), rows
    assert f"of the run 3 steps, 12 {JOBS[job][0]}" in rows


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo", "free_of_reference:mine"])
def test_a_reference_free_loss_has_no_reference(loss: str, capsys: Captured) -> None:
    flags = [f"--algorithm.loss.name={loss}", "--algorithm.loss.options={}"]
    code, text = dry_run(capsys, "dpo", *flags)
    assert code == 0 and "reference (" not in text
    for key, flag in (
        ("reference", "--reference.model.path=model"),
        ("reference_logprobs.precompute", "--reference_logprobs.precompute=true"),
    ):
        code, text = dry_run(capsys, "dpo", *flags, flag)
        [problem] = read_problems(text)
        assert (code, problem.key, problem.code) == (4, key, "reference-free-loss")
        assert f" {loss} " in problem.why


def test_a_separate_reference_is_shown_and_checked(capsys: Captured) -> None:
    flags = ["--reference.model.path=model", "--reference.zero.stage=3"]
    code, text = dry_run(capsys, "dpo", *flags)
    assert code == 0
    assert any(row.startswith("reference model (bfloat16, divided ") for row in rows_of(text))
    code, text = dry_run(capsys, "dpo", "--reference.model.path=short")
    [problem] = read_problems(text)
    assert (code, problem.key, problem.what) == (4, "reference.model.path", "short")
    assert problem.code == "sequence-over-positions" and "16 positions" in problem.why


def test_an_adapter_is_its_own_reference(capsys: Captured) -> None:
    code, text = dry_run(capsys, "dpo", "--actor.adapter.rank=4")
    assert code == 0
    assert any(re.match(r"reference \(the actor .*adapter", row) for row in rows_of(text))


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("adapter", [(), ("--actor.adapter.rank=4",)])
def test_a_reference_that_scores_before_training_is_shown_so(
    job: str, adapter: tuple[str, ...], capsys: Captured
) -> None:
    flags = ("--reference_logprobs.precompute=true", *adapter)
    code, text = dry_run(capsys, job, *flags)
    assert code == 0, text
    assert any(re.match(r"reference \(the actor's .*, before ", row) for row in rows_of(text))
    code, text = dry_run(capsys, job, *flags, "--reference.model.path=model")
    assert code == 0, text
    assert any(re.match(r"reference model \(.*\), before ", row) for row in rows_of(text))


@pytest.mark.parametrize(("job", "typed"), [("dpo", "dop"), ("kto", "kot")])
def test_a_misspelt_loss_and_a_missing_reference(job: str, typed: str, capsys: Captured) -> None:
    flags = (f"--algorithm.loss.name={typed}", "--reference.model.path=modle")
    code, text = dry_run(capsys, job, *flags)
    found = {problem.key: problem for problem in read_problems(text)}
    assert code == 2 and found.keys() == {"algorithm.loss", "reference.model.path"}
    loss, model = found["algorithm.loss"], found["reference.model.path"]
    assert f"{{name: {typed}" in loss.what and f"'{job}'?" in str(loss)
    assert model.what == "modle" and "model?" in model.fix


@pytest.mark.parametrize(("job", "key"), [("dpo", "nll_weight"), ("kto", "precompute")])
def test_help_lists_the_keys(job: str, key: str, capsys: Captured) -> None:
    assert main([job, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"plimsoll {job} CONFIG.yaml" in text and key in text
    assert JOBS[job][1].rpartition(", ")[2].partition(":")[0] in text
