"""A model that was trained with a chat template from a file brings it along: every job's, after the
file is gone, exported and merged too. It ends a turn where the template does.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, run_here, write_config, write_task
from transformers import AutoTokenizer, GenerationConfig

TURN = "<turn>"
TEMPLATE = (
    "{% for m in messages %}{{ '=' if m.role == 'assistant' else '' }}{{ m.content + '<turn>' }}"
    "{% endfor %}{{ '=' if add_generation_prompt else '' }}"
)
CHAT = [{"role": "user", "content": "1+1"}]
POLICY = {"model": {"path": "model", "dtype": "float32"}}
BASE: dict[str, Any] = {
    "run": {"steps": 1, "save_every": 1},
    "cluster": {"where": "local", "threads": 1},
    "data": {"chat_template": "turns.jinja", "max_tokens": 24},
    "batch": {"sequences": 2, "micro_batch_tokens": 64},
    "actor": POLICY,
}
PAIRS = {"batch": {"pairs": 2, "micro_batch_tokens": 64}}
JOBS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "sft": ({"prompt": "q", "response": "a"}, {}),
    "distill": ({"prompt": "q", "response": "a"}, {"teacher": POLICY}),
    "rm": ({"prompt": "q", "chosen": "a", "rejected": "b"}, PAIRS),
    "prm": ({"prompt": "q", "steps": "s", "labels": "l"}, {}),
    "dpo": ({"prompt": "q", "chosen": "a", "rejected": "b"}, PAIRS),
    "kto": ({"prompt": "q", "response": "a", "label": "good"}, {}),
    "ppo": (
        {"prompt": "q", "reference": "a"},
        {
            "batch": {"prompts": 2, "responses": 1, "micro_batch_tokens": 64},
            "critic": POLICY,
            "rewards": {"length": {"name": "length"}},
            "rollout": {"transformers": {}, "sampling": {"max_new_tokens": 4, "stop": [TURN]}},
        },
    ),
}
"""By job: the columns of its rows, and what its config has besides."""
POLICY_USE = "transformers and vLLM load it (`vllm serve {}/model`)"
USES = {
    "rm": "`plimsoll ppo` takes it as reward_model.role.model.path, and transformers loads it "
    "(AutoModelForSequenceClassification)",
    "prm": "transformers loads it: AutoModelForTokenClassification scores the steps",
}


def config_of(job: str) -> dict[str, Any]:
    columns, besides = JOBS[job]
    config = copy.deepcopy({**BASE, **besides})
    config["run"]["directory"] = job
    config["data"]["train"] = {"path": "chats.jsonl", **columns}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("template")
    write_task(home)
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN]})
    tokenizer.save_pretrained(home / "model")
    row = {"a": "2", "b": "3", "s": ["1", "2"], "l": [True, False], "good": True}
    rows = [row | {"q": f"{i}+1", "good": i % 2} for i in range(4)]
    (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def trained(home: Path, job: str, changes: Mapping[str, Any] = {}) -> Outcome:
    """One step, with a template whose file is gone afterwards."""
    config = config_of(job)
    for section, values in changes.items():
        config[section] |= values
    (home / "turns.jinja").write_text(TEMPLATE)
    write_config(home, job, config)
    outcome = run_here(home, job, f"{job}.yaml")
    (home / "turns.jinja").unlink()
    assert outcome.code == 0, outcome.err
    return outcome


def assert_chats(directory: Path, *, generates: bool) -> None:
    """In plain transformers, with the template and its end of turn."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "1+1<turn>=" and tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<end>"
    if generates:
        ends = GenerationConfig.from_pretrained(directory).eos_token_id
        assert set(ends) == set(tokenizer.convert_tokens_to_ids(["<end>", TURN]))


def told(job: str) -> str:
    return {"rm": "reward model", "prm": "process reward model"}.get(job, "model")


@pytest.mark.parametrize("job", JOBS)
def test_every_job_saves_and_exports_the_template(home: Path, job: str) -> None:
    ended = trained(home, job).out.splitlines()[-1]
    assert ended == f"the {told(job)} is in {job}/model: {USES.get(job, POLICY_USE).format(job)}"
    generates = job not in ("rm", "prm")
    assert_chats(home / job / "model", generates=generates)
    exported = run_here(home, "export", job, "--to", f"{job}-exported")
    assert exported.code == 0, exported.err
    assert (
        f"The {told(job)} of {job}/checkpoints/step-000001 is in {job}-exported: " in exported.out
    )
    assert_chats(home / f"{job}-exported", generates=generates)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        saved, again = (home / folder / name for folder in (f"{job}/model", f"{job}-exported"))
        assert saved.exists() == again.exists()
        assert not saved.exists() or saved.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("job", ["sft", "rm"])
def test_an_adapter_brings_the_template_into_a_merge(home: Path, job: str) -> None:
    """By the command that the run ends with, and by export."""
    run, base = {"directory": f"{job}-lora"}, POLICY["model"] | {"quantization": "nf4"}
    actor = {"adapter": {"rank": 2}, "model": base}
    ended = trained(home, job, {"run": run, "actor": actor}).out.splitlines()[-1]
    merge = f"merge {job}-lora/model --out DIRECTORY --quantization nf4"
    start = f"the adapter is in {job}-lora/model: a plain model of it and its base: "
    assert ended == f"{start}`plimsoll {merge}`"
    generates = job == "sft"
    assert_chats(home / f"{job}-lora" / "model", generates=generates)
    for command in (
        tuple(merge.replace("DIRECTORY", f"{job}-merged").split()),
        ("export", f"{job}-lora", "--to", f"{job}-into", "--merge"),
        ("export", f"{job}-lora", "--to", f"{job}-apart"),
    ):
        outcome = run_here(home, *command)
        assert outcome.code == 0, outcome.err
        assert_chats(home / command[3], generates=generates)


@pytest.mark.parametrize("brought", [("tokenizer.json", "tokenizer_config.json"), ()])
def test_an_adapter_without_a_template_is_merged_with_its_bases(
    home: Path, brought: tuple[str, ...]
) -> None:
    trained(home, "sft", {"run": {"directory": "bare"}, "actor": {"adapter": {"rank": 2}}})
    shutil.copytree(home / "model", home / "based")
    (home / "based" / "chat_template.jinja").write_text(TEMPLATE)
    for file in (home / "bare" / "model").iterdir():
        if not file.name.startswith("adapter") and file.name not in brought:
            file.unlink()
    command = ("merge", "bare/model", "--base", "based", "--out", "bare-merged")
    outcome = run_here(home, *command)
    assert outcome.code == 0, outcome.err
    assert_chats(home / "bare-merged", generates=False)
    for made in ("bare", "based", "bare-merged"):
        shutil.rmtree(home / made)


def test_what_is_trained_next_needs_no_template_and_is_evaluated(home: Path) -> None:
    """The first model's template is the next ones' own; PPO samples to the end of its turns."""
    trained(home, "sft", {"run": {"directory": "first"}})
    config = config_of("ppo")
    config["run"]["directory"] = "next"
    config["data"] |= {"chat_template": None, "eval": config["data"]["train"]}
    for role in ("actor", "critic"):
        config[role]["model"]["path"] = "first/model"
    config["rollout"]["sampling"] = {"max_new_tokens": 4}
    write_config(home, "next", config)
    assert run_here(home, "ppo", "next.yaml").code == 0
    assert_chats(home / "next" / "model", generates=True)
    assert not (home / "next" / "chat_template.jinja").exists()
    rows = ("--data.eval.path", "chats.jsonl", "--data.eval.prompt", "q")
    measured = run_here(home, "eval", "first", *rows, "--data.eval.response", "a")
    assert measured.code == 0, measured.err  # of a run whose template's file is gone


def test_plain_text_saves_no_template_and_an_own_one_stays(home: Path) -> None:
    trained(home, "sft", {"run": {"directory": "plain"}, "data": {"chat_template": "none"}})
    assert AutoTokenizer.from_pretrained(home / "plain" / "model").chat_template is None
    own = home / "own"
    shutil.copytree(home / "model", own)
    (own / "chat_template.jinja").write_text(TEMPLATE + "{# its own #}")
    # Llama 2 was published so, without do_sample: transformers reads it, and refuses to save it.
    generation = '{"eos_token_id": 14, "temperature": 0.6, "top_p": 0.9}'
    (own / "generation_config.json").write_text(generation)
    model = {"model": {"path": "own", "dtype": "float32"}}
    for name in (None, "none"):
        changes = {"data": {"chat_template": name}, "actor": model}
        out = trained(home, "sft", changes | {"run": {"directory": f"kept-{name}"}}).out
        saved = home / f"kept-{name}" / "model"
        assert (saved / "chat_template.jinja").read_text() == TEMPLATE + "{# its own #}"
        kept = json.loads((saved / "generation_config.json").read_text())
        turns = AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids(TURN)
        ends = {"eos_token_id": 14 if name else [14, turns]}  # those that turns were learned with
        assert kept.items() >= (json.loads(generation) | ends).items()
        assert (f"responses of the model end with {TURN}, too" in out) == (name is None)
