"""Settings that cannot work together end a command with code 4, before anything is loaded."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.cli import main
from plimsoll.machine import versions
from plimsoll.resolve.run_spec import RunSpec

SFT = """\
# sft: small enough for any machine
run: {directory: out, steps: 3}
cluster: {where: local, device: cpu}
data: {train: {path: rows.jsonl, prompt: q, response: a}, max_tokens: 64}
actor: {model: {path: model}}
"""
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
PPO = SFT.replace("response: a", "").replace("where: local, ", "").replace("# sft", "# ppo") + (
    "critic: {model: {path: model}}\nrewards: {r: {name: length}}\n"
    "rollout: {sampling: {max_new_tokens: 8}}\n"
)
SLEEP = ["--rollout.placement=shared", "--rollout.vllm.sleep_level=1"]

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(SFT)
    Path("ppo.yaml").write_text(PPO)
    Path("rows.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(SHAPE))
    Path("model/tokenizer.json").write_text("{}")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros(1, dtype=np.float32)}, "model/model.safetensors")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec[Any]]:
    """The jobs that were started: none is run."""
    found: list[RunSpec[Any]] = []
    monkeypatch.setattr("plimsoll.jobs.sft_loop.run", lambda spec, planned: found.append(spec))
    monkeypatch.setattr("plimsoll.jobs.rl_loop.run", lambda spec, planned: found.append(spec))
    return found


def test_a_plan_of_settings_that_cannot_work_ends_with_4(capsys: Captured) -> None:
    words = ["plan", "sft.yaml", "--actor.adapter.targets=[foo]"]
    assert main(words) == 4
    said = capsys.readouterr()
    assert "error adapter-targets: actor.adapter.targets: foo" in said.out
    assert said.err.startswith("error: ") and "error adapter-targets: " in said.err
    assert main([*words, "--json"]) == 4
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.keys() == {"code", "severity", "what", "why", "fix"}
    assert (problem["code"], problem["severity"]) == ("adapter-targets", "error")
    assert "q_proj" in problem["fix"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_run_is_refused_and_cannot_be_forced(
    force: list[str], started: list[RunSpec[Any]], capsys: Captured
) -> None:
    assert main(["sft", "sft.yaml", "--actor.adapter.targets=[foo]", *force]) == 4
    assert "adapter-targets" in capsys.readouterr().err
    assert not started and not Path("out").exists()


def test_rules_about_the_environment_hold_only_on_the_machine_of_the_run(
    started: list[RunSpec[Any]], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["ppo", "ppo.yaml", *SLEEP, "--data.max_tokens=32"]) == 0
    assert "sleep-expandable-segments" in capsys.readouterr().err and len(started) == 1
    elsewhere = ["--cluster.device=auto", "--cluster=4xH200", "--data.max_tokens=32"]
    main(["plan", "ppo.yaml", *SLEEP, *elsewhere])
    assert "sleep-expandable-segments" not in capsys.readouterr().out


def test_rules_about_the_machine_hold_without_a_plan_too(
    started: list[RunSpec[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("model/config.json").write_text(json.dumps(SHAPE | {"model_type": "mamba9"}))
    with monkeypatch.context() as old:
        old.setattr(versions, "version", lambda name: "0.18.0" if "vllm" in name else version(name))
        assert main(["ppo", "ppo.yaml", *SLEEP, "--data.max_tokens=32"]) == 4
    assert main(["ppo", "ppo.yaml", *SLEEP, "--data.max_tokens=32"]) == 0
    assert len(started) == 1


def test_a_warning_is_printed_and_the_run_starts(
    started: list[RunSpec[Any]], capsys: Captured
) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["sft", "sft.yaml", "--actor.zero.optimizer_offload=cpu"]) == 0
    assert "warning offload-without-gpu: actor.zero.optimizer_offload" in capsys.readouterr().err
    assert len(started) == 2
