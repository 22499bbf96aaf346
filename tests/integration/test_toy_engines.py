"""A trainer engine and a rollout engine of strangers: each is one folder and one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model

ROOT = Path(__file__).parents[2]
TOYS = Path(__file__).parent / "toy_engines"
LINES = {
    '("plimsoll.trainer.zero",)': '("plimsoll.trainer.zero", "plimsoll.trainer.plain")',
    '("plimsoll.sampler.vllm", ': '("plimsoll.sampler.parrot", "plimsoll.sampler.vllm", ',
}
"""The line of each, as it is and with the new engine."""
LENGTH = "def length(trajectory) -> float: return float(len(trajectory.response_tokens))\n"
CONFIG = {
    "preset": "grpo",
    "run": {"directory": "out", "steps": 2, "save_every": 2, "seed": 1},
    "cluster": {"where": "local", "device": "cpu", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "reference": "answer"},
        "chat_template": "none",
        "max_tokens": 32,
    },
    "batch": {"prompts": 2, "responses": 2, "micro_batch_tokens": 128},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "plain": {"momentum": 0.5},
        "optimizer": {"learning_rate": 0.01},
    },
    "rewards": {"length": {"name": "own.py:length"}},
    "rollout": {"parrot": {}, "sampling": {"max_new_tokens": 16}},
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source with both engines added."""
    source = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "src" / "plimsoll", source / "plimsoll")
    shutil.copytree(TOYS, source / "plimsoll", dirs_exist_ok=True)
    listed = source / "plimsoll" / "config" / "engines.py"
    text = listed.read_text()
    for line, with_new in LINES.items():
        assert text.count(line) == 1, line
        text = text.replace(line, with_new)
    listed.write_text(text)
    return source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, and the config of a run."""
    home = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer()
    shape = tiny_config("llama", True, vocab=len(tokenizer), hidden=32, heads=2, feed_forward=32)
    write_tiny_model(home / "model", shape, 0, tokenizer)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "own.py").write_text(LENGTH)
    (home / "grpo.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return home


def plimsoll(house: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(house), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "plimsoll", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def test_they_train_a_run_of_two_steps(house: Path, folder: Path) -> None:
    done = plimsoll(house, folder, "grpo", "grpo.yaml")
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = {row["step"]: row for row in rows if "actor/grad_norm" in row}
    norms = {step: row["actor/grad_norm"] for step, row in steps.items()}
    assert norms.keys() == {1, 2} and min(norms.values()) > 0
    assert all(row["sync/logprob_gap"] < 1e-3 for row in rows)
    assert (
        folder / "out" / "checkpoints" / "step-000002" / "actor" / "momentum.safetensors"
    ).is_file()


def test_their_prices_are_in_the_plan(house: Path, folder: Path) -> None:
    """The trainer has a price of its own; the sampler has none, and its price is coarse."""
    done = plimsoll(
        house, folder, "plan", "grpo.yaml", "--cluster", "cpu", "--host-memory", "16GB", "--json"
    )
    assert done.returncode == 0, done.stderr
    items = json.loads(done.stdout)["items"]
    names = {item["item"] for item in items}
    assert {"plain weights", "plain gradients", "plain momentum"} <= names
    coarse = {item["item"] for item in items if item["source"].startswith("coarse: ")}
    assert coarse == {"weights", "KV cache", "logits"}


@pytest.mark.parametrize(
    ("flag", "code"),
    [("--cluster.ranks=2", 4), ("--actor.zero.stage=2", 4), ("--actor.plain.momentun=1", 2)],
)
def test_their_rules_and_settings_hold(house: Path, folder: Path, flag: str, code: int) -> None:
    """A rule of theirs, an engine beside another, and a key that is misspelt."""
    assert plimsoll(house, folder, "plan", "grpo.yaml", flag).returncode == code


def test_what_they_need_installed_is_looked_for(house: Path, folder: Path) -> None:
    done = plimsoll(house, folder, "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["numpy"]["state"] == "ok" and "ninja" in str(findings["compilers"])
    said = "from plimsoll.cluster.exit_reason import says_out_of_memory as of_memory"
    asked = f"{said}; print(of_memory('the seed is all eaten'), of_memory('it sleeps'))"
    environment = {**os.environ, "PYTHONPATH": str(house)}
    told = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True
    )
    assert told.stdout.split() == ["True", "False"], told.stderr


def test_they_are_described(house: Path, folder: Path) -> None:
    done = plimsoll(house, folder, "grpo", "grpo.yaml", "--dry-run", "--run.directory=other")
    assert "plain PyTorch" in done.stdout and "rollout (parrot)" in done.stdout
    keys = plimsoll(house, folder, "grpo", "--help", "rollout.parrot").stdout
    assert "--rollout.parrot.repeats" in keys
