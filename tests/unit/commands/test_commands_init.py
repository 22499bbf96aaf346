"""`plimsoll init`: columns told by their names, a config that its job takes and that fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.cli import main
from plimsoll.commands.init import InitRequest, describe_value, guess_columns
from plimsoll.commands.planning import plan_job
from plimsoll.config.keys import find_key, keys_of
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any

ROWS: Mapping[str, Mapping[str, Any]] = {
    "gsm8k": {"question": "1+1?", "answer": "#### 2"},
    "chats": {"messages": [{"role": "user", "content": "a"}]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "dialogues": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a"},
    "labelled": {"prompt": "a", "completion": "b", "label": True},
    "steps": {"prompt": "a", "completions": ["b"], "labels": [True]},
    "plain": {"text": "a"},
}


def write_rows(folder: Path, kind: str, row: Mapping[str, Any] | None = None) -> str:
    path = folder / f"{kind}.jsonl"
    path.write_text((json.dumps(row or ROWS[kind]) + "\n") * 3)
    return str(path)


@pytest.mark.parametrize(
    "job, kind, columns",
    [
        ("sft", "gsm8k", {"prompt": "question", "response": "answer"}),
        ("grpo", "gsm8k", {"prompt": "question", "reference": "answer"}),
        ("sft", "chats", {"messages": "messages"}),
        ("rl", "chats", {"messages": "messages"}),
        ("sft", "plain", {"text": "text"}),
        ("dpo", "pairs", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
        ("rm", "dialogues", {"chosen": "chosen", "rejected": "rejected"}),
        ("kto", "labelled", {"prompt": "prompt", "response": "completion", "label": "label"}),
        ("prm", "steps", {"prompt": "prompt", "steps": "completions", "labels": "labels"}),
        ("ppo", "pairs", {"prompt": "prompt"}),
    ],
)
def test_columns_are_told_by_their_names(job: str, kind: str, columns: dict[str, str]) -> None:
    assert guess_columns(JOBS[job], InitRequest("model", "data"), ROWS[kind]) == columns


def test_unknown_columns_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"x1, x2.*--data\.train\.prompt COLUMN"):
        guess_columns(JOBS["sft"], InitRequest("model", "data.jsonl"), {"x1": "a", "x2": "b"})
    flags = ["--data.train.prompt", "x1", "--data.train.response", "x2"]
    assert (
        guess_columns(JOBS["sft"], InitRequest("model", "data", flags=flags), {"x1": "", "x2": ""})
        == {}
    )


KINDS = {"sft": "gsm8k", "dpo": "pairs", "rm": "pairs", "kto": "labelled", "prm": "steps"}
FEW = ("distill", "sample", "rl")
"""A teacher, a sampler and an algorithm are for the user to say."""


@pytest.mark.parametrize("job", [name for name in JOBS if name not in FEW])
def test_every_jobs_config_fits_on_the_cards_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path, KINDS.get(job, "gsm8k"))
    words = ["--model", "Qwen/Qwen2.5-1.5B", "--data", data, "--eval", data]
    cards = ["--cluster", "2xRTX4090", "--host-memory", "256GB"]
    assert main(["init", job, *words, *cards]) == 0
    spec = load_any(f"{job}.yaml")
    assert plan_job(spec).verdict == "fits"
    assert Path(f"{job}.yaml").read_text().startswith(f"# {job}:")


def test_what_does_not_fit_is_changed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "Qwen/Qwen2.5-7B", "--data", write_rows(tmp_path, "gsm8k")]
    assert main(["init", "sft", *words, "--cluster", "2xRTX4090", "--host-memory", "1TB"]) == 0
    told = capsys.readouterr().out
    assert "actor.zero.stage: 3" in told
    assert yaml.safe_load(Path("sft.yaml").read_text())["actor"]["zero"]["stage"] == 3


def test_what_never_fits_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "Qwen/Qwen2.5-72B", "--data", write_rows(tmp_path, "gsm8k")]
    assert main(["init", "sft", *words, "--cluster", "1xRTX4090", "--host-memory", "32GB"]) == 3
    assert "smaller model" in capsys.readouterr().err
    assert not Path("sft.yaml").exists()


def test_a_key_that_is_given_stays_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "Qwen/Qwen2.5-0.5B", "--data", write_rows(tmp_path, "gsm8k")]
    given = ["--cluster", "cpu", "--host-memory", "64GB", "--run.steps", "7"]
    assert main(["init", "sft", *words, *given]) == 0
    assert yaml.safe_load(Path("sft.yaml").read_text())["run"]["steps"] == 7
    assert main(["init", "sft", *words, *given]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["init", "sft", *words, *given[:4], "--run.stepps", "7", "-o", "b.yaml"]) == 2
    assert "stepps" in capsys.readouterr().err and not Path("b.yaml").exists()


def test_without_a_terminal_no_question_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "sfd"]) == 2
    assert "Did you mean 'sft'?" in capsys.readouterr().err
    assert main(["init", "sft", "--model", "Qwen/Qwen2.5-0.5B"]) == 2
    assert "--data is not given" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said", [("", "has no rows"), ("{\n", "empty.jsonl:1:"), (None, "There is no")]
)
def test_data_without_a_row_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("empty.jsonl").write_text(text)
    assert main(["init", "sft", "--model", "Qwen/Qwen2.5-0.5B", "--data", "empty.jsonl"]) == 2
    assert said in capsys.readouterr().err


def test_a_mistyped_model_is_refused_before_anything_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "model").mkdir()
    for mistyped, said in (("./modle", "did you mean model?"), ("model", "no config.json")):
        assert main(["init", "sft", "--model", mistyped, "--data", "nowhere.jsonl"]) == 2
        told = capsys.readouterr().err
        assert said in told and "nowhere" not in told


def test_a_question_is_asked_again_until_its_answer_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path, "gsm8k")
    answers = ["./modle", "Qwen/Qwen2.5-0.5B", "gsm8k.jsno", data, ""]
    lines = iter(answers)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console.input", lambda *_, **__: next(lines))
    words = ["--cluster", "cpu", "--host-memory", "64GB"]
    assert main(["init", "sft", *words]) == 0
    told = capsys.readouterr().out
    assert "`modle` is not in" in told and "did you mean gsm8k.jsonl?" in told
    assert next(lines, None) is None  # each was asked for
    written = yaml.safe_load(Path("sft.yaml").read_text())
    assert written["actor"]["model"]["path"] == "Qwen/Qwen2.5-0.5B"


def test_comments_describe_the_chosen_values() -> None:
    keys = tuple(keys_of(JOBS["ppo"].config))

    def said(name: str, value: str) -> tuple[str, ...]:
        key = find_key(keys, tuple(name.split(".")))
        assert key is not None
        return describe_value(key, value)

    assert said("rollout.vllm", "{}") == ("vLLM: fast, in Ray actors",)
    assert "without vLLM" in said("rollout.transformers", "{}")[0]
    assert said("cluster.where", "ray") == ("rank actors and engine actors",)
    assert said("actor.optimizer.kind", "adamw") == ()  # its text is about the other
    assert said("actor.zero.optimizer_offload", "none") == ()
    assert said("actor.optimizer.kind", "adamw_8bit")[0].endswith("Dettmers et al. 2021)")
    assert said("run.steps", "200")[-1].startswith("Steps of the run")
    whole, lead = said("rollout.vllm.adapter", "separate")
    assert whole.startswith(f"{lead}: the adapter alone")


@pytest.mark.parametrize(("job", "kind"), [("grpo", "gsm8k"), ("sft", "gsm8k"), ("dpo", "pairs")])
def test_the_size_of_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path, kind)
    words = ["--model", "Qwen/Qwen2.5-0.5B", "--data", data, "--cluster", "1xA100-80GB"]
    assert main(["init", job, *words, "--host-memory", "256GB"]) == 0
    text = Path(f"{job}.yaml").read_text()
    written = yaml.safe_load(text)["batch"]
    assert {*written} - {"micro_batch_tokens"} == {
        "grpo": {"prompts", "responses"},
        "sft": {"sequences"},
        "dpo": {"pairs"},
    }[job]
    assert "transformers: for machines" not in text
