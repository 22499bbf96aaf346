"""A trainer engine and a rollout engine from outside: each takes one folder and one line.

They stand in a copy of the source. One process runs several commands with it, as an import of the
copy takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from safetensors.torch import load_file

from plimsoll.commands.demo import make_tokenizer
from plimsoll.model.tiny import tiny_config, write_tiny_model

ROOT = Path(__file__).parents[2]
TOYS = Path(__file__).parent / "toy_engines"
LINES = {
    '("plimsoll.trainer.zero",)': '("plimsoll.trainer.zero", "plimsoll.trainer.plain")',
    '("plimsoll.sampler.vllm", ': '("plimsoll.sampler.parrot", "plimsoll.sampler.vllm", ',
}
"""The line that lists the engines of each kind, and the line with the new engine."""
LENGTH = "def length(trajectory) -> float: return float(len(trajectory.response_tokens))\n"
CONFIG = {
    "preset": "grpo",
    "run": {"directory": "out", "steps": 4, "save_every": 2, "seed": 1},
    "cluster": {"where": "local", "device": "cpu", "threads": 1, "rank_sleep": "all"},
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
    "rollout": {
        "parrot": {"naps": True},
        "placement": "shared",
        "sampling": {"max_new_tokens": 16},
    },
}
MAIN = """
import contextlib, io, json, sys
from plimsoll.cli import main

answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(words)
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


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


def plimsoll(house: Path, folder: Path, *commands: str) -> list[Answer]:
    """Run the commands in one process, each as its words separated by blanks."""
    done = run_python(house, folder, MAIN, json.dumps([command.split() for command in commands]))
    return [Answer(*answer) for answer in json.loads(done.splitlines()[-1])]


def run_python(house: Path, folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(house), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step of a run, without seconds and bytes."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    names = ("actor/grad_norm", "actor/loss", "reward/mean", "sync/logprob_gap")
    return {
        row["step"]: {name: row[name] for name in names if name in row}
        for row in rows
        if "actor/grad_norm" in row
    }


@pytest.fixture(scope="module")
def whole(house: Path, folder: Path) -> Path:
    """A run of four steps, in one process."""
    [run] = plimsoll(house, folder, "grpo grpo.yaml --run.directory=whole")
    assert run.code == 0, run.err
    return folder / "whole"


def test_a_run_of_toy_engines_learns_and_sleeps(whole: Path) -> None:
    found = steps(whole)
    assert found.keys() == {1, 2, 3, 4}
    assert min(step["actor/grad_norm"] for step in found.values()) > 0
    assert max(step["sync/logprob_gap"] for step in found.values()) < 1e-3
    ledger = (whole / "ledger.jsonl").read_text()
    assert '"rollout"' in ledger


def test_a_resumed_run_is_the_whole_run(house: Path, folder: Path, whole: Path) -> None:
    started = "grpo grpo.yaml --run.directory=halves"
    first, second = plimsoll(
        house, folder, f"{started} --run.steps=2", f"{started} --run.resume=auto"
    )
    assert (first.code, second.code) == (0, 0), second.err
    assert steps(folder / "halves") == steps(whole)
    weights = (load_file(run / "model/model.safetensors") for run in (whole, folder / "halves"))
    one, other = ({name: tensor.numpy().tobytes() for name, tensor in w.items()} for w in weights)
    assert one == other


@pytest.mark.engine
def test_two_ranks_under_ray_learn_the_same(house: Path, folder: Path, whole: Path) -> None:
    ranks = "--cluster.where=ray --cluster.ranks=2 --run.directory=ray"
    [run] = plimsoll(house, folder, f"grpo grpo.yaml --run.steps=2 {ranks}")
    assert run.code == 0, run.err
    found, alone = steps(folder / "ray"), steps(whole)
    assert found.keys() == {1, 2}
    for step, values in found.items():
        assert values == pytest.approx(alone[step], rel=1e-3, abs=1e-4)
    saved = load_file(folder / "ray/checkpoints/step-000002/actor/plain.safetensors")
    assert any(name.startswith("momentum/") for name in saved)


REFUSED = {
    "--actor.optimizer.kind=adamw_8bit": (4, "keeps its momentum in full"),
    "--actor.zero.stage=2": (4, "engine-twice"),
    "--actor.plain.momentun=1": (2, "momentum"),
}
"""A rule of the engine, an engine beside another, and a key that is misspelt."""


def test_commands_know_the_engines(house: Path, folder: Path) -> None:
    """The plan has their prices; rules, doctor, dry run and help have their words."""
    planned, doctor, dry, help_text, *refused = plimsoll(
        house,
        folder,
        "plan grpo.yaml --cluster cpu --host-memory 16GB --json",
        "doctor --json",
        "grpo grpo.yaml --dry-run --run.directory=other",
        "grpo --help rollout.parrot",
        *(f"plan grpo.yaml {flag}" for flag in REFUSED),
    )
    assert planned.code == 0, planned.err
    items = json.loads(planned.out)["items"]
    assert {"plain weights", "plain gradients", "plain momentum"} <= {i["item"] for i in items}
    coarse = {item["item"] for item in items if item["source"].startswith("coarse: ")}
    assert coarse == {"weights", "KV cache", "logits"}  # the sampler has no price of its own
    findings = {finding["name"]: finding for finding in json.loads(doctor.out)["findings"]}
    assert findings["numpy"]["state"] == "ok" and "ninja" in str(findings["compilers"])
    assert "plain PyTorch" in dry.out and "rollout (parrot)" in dry.out
    assert "--rollout.parrot.repeats" in help_text.out
    for (flag, (code, words)), answer in zip(REFUSED.items(), refused, strict=True):
        assert answer.code == code and words in answer.out + answer.err, flag


def test_their_words_for_a_lack_of_memory_are_known(house: Path, folder: Path) -> None:
    script = "from plimsoll.cluster.exit_reason import says_out_of_memory as of_memory\n"
    script += "print(of_memory('the seed is all eaten'), of_memory('it sleeps'))"
    assert run_python(house, folder, script).split() == ["True", "False"]
