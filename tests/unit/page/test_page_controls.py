"""Which settings a page of a plan offers, and which flags their texts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.flags import parse_flags
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import load_any
from plimsoll.page.plan import Control, controls, flags_from, merge_flags
from plimsoll.resolve.run_spec import RunSpec

SFT = """\
# sft
run: {directory: out, steps: 3}
cluster: {ranks: 2, hardware: 2xA100-40GB}
data: {train: {path: rows.jsonl, prompt: q, response: a}}
actor: {model: {path: Qwen/Qwen2.5-0.5B}}
"""
DPO = SFT.replace("sft", "dpo").replace("response: a", "chosen: a, rejected: b")
PPO = """\
# ppo
run: {directory: out, steps: 3}
cluster: {ranks: 2, hardware: 4xA100-40GB}
data: {train: {path: rows.jsonl, prompt: q}}
actor: {model: {path: Qwen/Qwen2.5-0.5B}, adapter: {rank: 4, alpha: 8}}
critic: {model: {path: Qwen/Qwen2.5-0.5B}}
rewards: {length: {name: length}}
rollout: {vllm: {memory_share: 0.3}}
"""


def spec_of(tmp_path: Path, text: str, *flags: str) -> RunSpec[Any]:
    (tmp_path / "job.yaml").write_text(text)
    return load_any(str(tmp_path / "job.yaml"), flags)


def offered(spec: RunSpec[Any]) -> dict[str, Control]:
    return {control.key: control for control in controls(spec)}


def made(spec: RunSpec[Any], texts: dict[str, str]) -> dict[str, object]:
    return {flag.name: flag.value for flag in flags_from(spec, texts)}


def test_each_control_has_what_the_schema_and_the_run_say(tmp_path: Path) -> None:
    found = offered(spec_of(tmp_path, PPO))
    stage = found["critic.zero.stage"]
    assert (stage.group, stage.label, stage.value) == ("critic", "zero.stage", "2")
    assert stage.choices == ("0", "1", "2", "3") and stage.doc.startswith("0 divides nothing")
    assert found["actor.model.gradient_checkpointing"].choices == ("true", "false", "selective")
    share, tokens = found["rollout.vllm.memory_share"], found["batch.micro_batch_tokens"]
    assert (share.value, share.step, share.choices) == ("0.3", 0.05, ())
    assert (tokens.value, tokens.step, tokens.kind) == ("4096", None, "integer >= 1")
    assert found["actor.adapter.rank"].value == "4" and found["critic.adapter.rank"].value == ""
    assert "4xH100-80GB" in found["cluster.hardware"].proposals
    assert found["cluster.critic_ranks"].value == ""
    assert "cluster.reward_ranks" not in found  # there is no reward model
    judged = offered(spec_of(tmp_path, f"{PPO}reward_model: {{role: {{model: {{path: r}}}}}}\n"))
    assert judged["cluster.reward_ranks"].value == ""


def test_a_run_is_offered_what_it_has(tmp_path: Path) -> None:
    sft, dpo, ppo = (set(offered(spec_of(tmp_path, text))) for text in (SFT, DPO, PPO))
    assert {key.partition(".")[0] for key in sft} == {"cluster", "batch", "data", "actor"}
    assert dpo - sft == {
        *("reference.zero.stage", "reference.zero.offload", "reference.model.quantization"),
        *("reference_logprobs.precompute", "batch.pairs"),
    }
    assert sft - dpo == {"batch.sequences"}
    lengths = [
        control.label for control in controls(spec_of(tmp_path, PPO)) if control.group == "batch"
    ]
    assert lengths == [
        *("prompts", "responses", "micro_batch_tokens", "max_tokens", "max_new_tokens")
    ]
    assert "rollout.vllm.tensor_parallel" in ppo and "cluster.critic_ranks" not in sft
    slow = offered(spec_of(tmp_path, PPO.replace("vllm: {memory_share: 0.3}", "transformers: {}")))
    engines = [key for key in slow if key.startswith("rollout.") and "sampling" not in key]
    assert set(engines) == {
        *("rollout.placement", "rollout.engines", "rollout.transformers.max_sequences")
    }
    assert "reference.zero.stage" not in ppo  # it is the actor without its adapter


def test_the_length_of_episodes_is_offered_by_environment(tmp_path: Path) -> None:
    tools = "environments: {tools: {name: functions, tools: [tools.py:halve], max_tokens: 999}}\n"
    found = offered(spec_of(tmp_path, PPO + tools))["environments.tools.max_tokens"]
    assert (found.group, found.label, found.value) == ("batch", "tools.max_tokens", "999")


def test_texts_are_read_as_flags_are(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PPO)
    texts = {"actor.zero.stage": "3", "rollout.vllm.memory_share": " 0.5", "cluster.hardware": ""}
    assert made(spec, texts) == {
        **{"--actor.zero.stage": 3, "--rollout.vllm.memory_share": 0.5, "--cluster.hardware": None}
    }


def test_an_adapter_without_a_rank_is_none(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PPO)
    assert made(spec, {"actor.adapter.rank": ""}) == {"--actor.adapter": None}
    assert made(spec, {"actor.adapter.rank": "8"}) == {"--actor.adapter.rank": 8}


def test_a_reference_that_is_left_to_its_default_gets_its_model(tmp_path: Path) -> None:
    found = made(
        spec_of(tmp_path, DPO), {"reference.zero.offload": "cpu", "reference.zero.stage": "3"}
    )
    assert found == {
        **{"--reference.zero.offload": "cpu", "--reference.zero.stage": 3},
        "--reference.model.path": "Qwen/Qwen2.5-0.5B",
    }


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("run.directory", "/", r"run\.directory cannot be changed here"),
        ("rollout.engines", "2", r"cannot be changed here"),
        ("actor.zero.stage", "[3", "no complete YAML"),
    ],
)
def test_other_keys_and_broken_texts_are_refused(
    tmp_path: Path, key: str, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        flags_from(spec_of(tmp_path, SFT), {key: text})


@pytest.mark.parametrize(
    ("given", "over", "both"),
    [
        (["--a.b=1", "--c.d=2"], ["--a.b=3"], {"--c.d": 2, "--a.b": 3}),
        (["--a.b.c=1", "--a.b.d=2"], ["--a.b=null"], {"--a.b": None}),
        (["--a.b={c: 1, d: 2}"], ["--a.b.c=3"], {"--a.b": {"c": 3, "d": 2}}),
        ([], ["--a.b=3"], {"--a.b": 3}),
    ],
)
def test_changes_win_over_the_flags_of_the_command(
    given: list[str], over: list[str], both: dict[str, object]
) -> None:
    found = merge_flags(parse_flags(given), parse_flags(over))
    assert {flag.name: flag.value for flag in found} == both
