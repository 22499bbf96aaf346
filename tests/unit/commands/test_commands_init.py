"""`plimsoll init`: columns told by their names, a config that its job takes and that fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.cli import main
from plimsoll.commands.init import InitRequest, describe_value, make_config
from plimsoll.commands.init_rows import (
    choose_reward,
    choose_steps,
    guess_columns,
    hold_out,
    longest_tokens,
)
from plimsoll.commands.planning import plan_job
from plimsoll.config.keys import find_key, keys_of
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.run.ending import notes_of

MODEL = "Qwen/Qwen2.5-0.5B"
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
    assert guess_columns(JOBS[job], "data", ROWS[kind]) == columns


def test_unknown_columns_are_asked_for(tmp_path: Path) -> None:
    data = write_rows(tmp_path, "odd", {"x1": "a", "x2": "b"})
    with pytest.raises(ConfigError, match=r"x1, x2.*--data\.train\.prompt COLUMN"):
        make_config(JOBS["sft"], InitRequest(MODEL, data, cluster="cpu"))
    flags = ["--data.train.prompt", "x1", "--data.train.response", "x2"]
    text, _ = make_config(JOBS["sft"], InitRequest(MODEL, data, cluster="cpu", flags=flags))
    assert yaml.safe_load(text)["data"]["train"]["response"] == "x2"


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

    def said(name: str, value: str, *, samples: bool = True) -> tuple[str, ...]:
        key = find_key(keys, tuple(name.split(".")))
        assert key is not None
        return describe_value(key, value, samples=samples)

    assert said("rollout.vllm", "{}") == ("vLLM: fast, in Ray actors",)
    assert "without vLLM" in said("rollout.transformers", "{}")[0]
    assert said("cluster.where", "ray") == ("rank actors and engine actors",)
    assert said("actor.optimizer.kind", "adamw") == ()  # its text is about the other
    assert said("actor.zero.optimizer_offload", "none") == ()
    assert said("actor.optimizer.kind", "adamw_8bit")[0].endswith("Dettmers et al. 2021)")
    assert said("run.steps", "200")[-1].startswith("Steps of the run: rollout")
    assert said("run.steps", "200", samples=False)[-1] == "Steps of the run: optimizer steps"
    assert said("data.max_tokens", "9")[-1] == "The longest prompt, in tokens"
    assert said("data.max_tokens", "9", samples=False)[-1] == "The longest sequence, in tokens"
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


@pytest.mark.parametrize(
    ("references", "name"),
    [
        (["5", "#### 1,234", "\\frac{1}{2}", 7, 2.5], "math_answer"),
        (["Paris", "Rome", "5"], "exact_match"),
        (["A", "B", "C"], "exact_match"),
        ([["assert f(1) == 2"], ["assert f(2) == 3"]], "code"),
        ([{"inputs": ["1"], "outputs": ["2"]}], "code"),
        (['{"inputs": ["1"], "outputs": ["2"]}'], "code"),
        (["def check(candidate):\n    assert candidate(1) == 2"], "code"),
        ([["Paris"], ["Rome"]], None),
        ([True, False], None),
        ([None], None),
        (["#### Paris"], None),
    ],
)
def test_the_reward_is_told_by_the_references(references: list[object], name: str | None) -> None:
    choice = choose_reward(references)
    assert choice.name == name and not choice.skips_rows and choice.why


def test_rows_of_a_few_references_without_mathematics_are_skipped() -> None:
    choice = choose_reward([*map(str, range(19)), "even"])
    assert (choice.name, choice.skips_rows) == ("math_answer", True)
    assert "1 reference of 20" in str(choice)


@pytest.mark.parametrize(
    ("rows", "sizes", "steps"),
    [
        (50, {"prompts": 32, "responses": 8}, 16),
        (7473, {"prompts": 32, "responses": 8}, 200),
        (50, {"sequences": 32}, 5),
        (640, {"pairs": 32}, 20),
        (3, {"pairs": 32}, 1),
    ],
)
def test_the_steps_are_told_by_the_rows(rows: int, sizes: dict[str, int], steps: int) -> None:
    assert choose_steps(rows, sizes) == steps


def test_the_longest_row_decides_the_tokens_and_of_rl_its_prompt() -> None:
    columns = {"prompt": "q", "response": "a", "reference": "a"}
    rows = [{"q": "1", "a": "1", "other": "x" * 9000}] * 500 + [{"q": "1" * 900, "a": "1" * 3000}]
    assert longest_tokens(JOBS["grpo"], columns, rows) == 512
    assert longest_tokens(JOBS["sft"], columns, rows) == 2048
    pairs = {"prompt": "q", "chosen": "c", "rejected": "r"}
    assert longest_tokens(JOBS["dpo"], pairs, [{"q": "1", "c": "1" * 600, "r": "1" * 600}]) == 512
    assert longest_tokens(JOBS["sft"], {}, [{"any": "語" * 700}]) == 1024  # a token a character


def test_rows_are_held_out_at_random_and_each_is_in_one_file(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"n": {n}}}\n' for n in range(100)))
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    hold_out(str(data), 10, train, held_out)
    rows = [[json.loads(line)["n"] for line in file.open()] for file in (train, held_out)]
    assert len(rows[1]) == 10 and sorted([*rows[0], *rows[1]]) == [*range(100)]
    assert rows[1] != [*range(90, 100)]
    with pytest.raises(ConfigError, match="from 1 to 99"):
        hold_out(str(data), 100, train, held_out)


def test_a_number_holds_rows_out_and_files_are_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}", "answer": n}) + "\n" for n in range(50)))
    words = ["init", "grpo", "--model", MODEL, "--data", str(data), "--cluster", "1xA100-80GB"]
    words += ["--host-memory", "99GB", "-o", "my grpo.yaml"]
    assert main([*words, "--eval", "50"]) == 2
    assert not list(tmp_path.glob("my grpo*"))
    assert main([*words, "--eval", "10", "--actor.adapter.rank", "8"]) == 0
    told = capsys.readouterr().out
    assert "plimsoll grpo 'my grpo.yaml' --dry-run" in told
    assert "13 of 32 prompts: 10 epochs of 40 rows" in told
    written = yaml.safe_load(Path("my grpo.yaml").read_text())
    assert written["data"]["eval"]["path"] == "my grpo-eval.jsonl"
    assert written["run"]["steps"] == 13 and written["run"]["eval_every"] == 4
    assert written["actor"]["optimizer"]["learning_rate"] == 1e-5  # ten times that of all weights
    assert written["rewards"]["correct"]["name"] == "math_answer"


def test_preference_pairs_are_recognised(tmp_path: Path) -> None:
    data = write_rows(tmp_path, "pairs")
    request = InitRequest(MODEL, data, cluster="cpu")
    with pytest.raises(ConfigError) as refused:
        make_config(JOBS["ppo"], request)
    assert "plimsoll init dpo" in notes_of(refused.value)[0]
    reward = replace(request, flags=["--rewards.short.name", "length"])
    _, remarks = make_config(JOBS["ppo"], reward)
    assert any("plimsoll init dpo" in remark for remark in remarks)
    with pytest.raises(ConfigError, match="preference pairs, which dpo and rm"):
        make_config(JOBS["sft"], request)
    assert not any("init dpo" in remark for remark in make_config(JOBS["kto"], request)[1])
