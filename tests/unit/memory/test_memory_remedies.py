"""What a plan says to write instead: it can be written, and the memory that lacked becomes less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from examples import percent
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import read_spec

from plimsoll.config.problems import Problem
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.levers.descent import OTHERS_STAY, RISKY
from plimsoll.memory.levers.trials import Change, apply_changes, value_at
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.load import spec_of as job_spec
from plimsoll.resolve.run_spec import RunSpec

ROWS = {
    "sft": "prompt: q, response: a",
    "rm": "prompt: q, chosen: a, rejected: b",
    "dpo": "prompt: q, chosen: a, rejected: b",
    "kto": "prompt: q, response: a, label: l",
    "distill": "prompt: q, response: a",
    "ppo": "prompt: q",
}
FURTHER = {
    "distill": "teacher: {model: {path: Qwen/Qwen2.5-14B}}\n",
    "ppo": "rewards: {r: {name: length}}\n",
}
COUNTS = {"dpo": "pairs", "rm": "pairs", "ppo": "prompts"}


def job_config(
    job: str, role: str, *, tokens: int = 1024, micro_batch: int = 2048, further: str = ""
) -> RunSpec[Any]:
    """role: the actor, and the critic too."""
    text = (
        "run: {directory: out, steps: 10}\n"
        f"data: {{train: {{path: x, {ROWS[job]}}}, max_tokens: {tokens}}}\n"
        f"batch: {{{COUNTS.get(job, 'sequences')}: 64, micro_batch_tokens: {micro_batch}}}\n"
        f"actor: {role}\n" + (f"critic: {role}\n" if job == "ppo" else "")
    )
    return read_spec(job, text + FURTHER.get(job, "") + further)


def plan(config: RunSpec[Any], cluster: str, host: int = 10**12) -> Plan:
    return make_plan(config, Ground(parse_cluster(cluster, config.cluster.nodes, host)))


def lacking(found: Plan) -> list[Problem]:
    codes = ("device-memory", "host-memory", "vllm-share", "vllm-share-beside-training")
    return [one for one in found.problems if one.severity == "error" and one.code in codes]


def settings_of(fix: str) -> Iterator[dict[str, Any]]:
    """Return the keys and values of each way that has some."""
    for way in (
        fix.replace(" or more", "").replace(RISKY, "").removesuffix(OTHERS_STAY).split(", or ")
    ):
        pairs = [re.fullmatch(r"([\w.]+): (\S+)", part) for part in way.split(" with ")]
        if all(pairs):
            yield {pair[1]: yaml.safe_load(pair[2]) for pair in pairs if pair}


def written(config: RunSpec[Any], values: dict[str, Any]) -> RunSpec[Any] | None:
    return apply_changes(
        config, [Change(k, value_at(config.config, k), v) for k, v in values.items()]
    )


def errors(found: Plan) -> set[str | None]:
    return {one.code for one in found.problems if one.severity == "error"}


@settings(max_examples=percent(15))
@given(
    job=st.sampled_from(sorted(ROWS)),
    model=st.sampled_from(["Qwen/Qwen2.5-7B", "microsoft/phi-4", "mistralai/Mixtral-8x7B-v0.1"]),
    stage=st.integers(0, 3),
    offload=st.booleans(),
    adapter=st.sampled_from(["", ", adapter: {rank: 16, targets: [q_proj, o_proj, qkv_proj]}"]),
    quantized=st.booleans(),
    checkpointing=st.sampled_from(["true", "false", "selective"]),
    micro_batch=st.sampled_from([2048, 65536]),
    ranks=st.sampled_from([1, 4]),
    level=st.integers(0, 2),
    cluster=st.sampled_from(["4xRTX4090", "4xA100-80GB"]),
    host=st.sampled_from([10**11, 10**12]),
)
def test_what_is_advised_mends_what_it_is_advised_for(
    job: str,
    model: str,
    stage: int,
    offload: bool,
    adapter: str,
    quantized: bool,
    checkpointing: str,
    micro_batch: int,
    ranks: int,
    level: int,
    cluster: str,
    host: int,
) -> None:
    assume(stage > 0 or not offload)
    adapter = adapter.replace("q_proj, o_proj, qkv_proj", _targets(model))
    quantization = "nf4" if adapter and quantized else "none"
    role = (
        f"{{model: {{path: {model}, gradient_checkpointing: {checkpointing}, "
        f"quantization: {quantization}}}, zero: {{stage: {stage}, "
        f"optimizer_offload: {'cpu' if offload else 'none'}}}{adapter}}}"
    )
    engines = (
        f"engines: {ranks}, placement: shared, vllm: {{memory_share: 0.5, sleep_level: {level}}}"
    )
    further = f"cluster: {{ranks: {ranks}}}\n"
    further += f"rollout: {{{engines}}}\n" if job == "ppo" else ""
    config = job_config(job, role, micro_batch=micro_batch, further=further)
    before = plan(config, cluster, host)
    for problem in lacking(before):
        for values in settings_of(problem.fix):
            better = written(config, values)
            assert better is not None, f"{values} contradicts the rest: {problem}"
            after = errors(plan(better, cluster, host))
            assert problem.code not in after, (values, problem)
            assert after <= errors(before), (values, problem)


def _targets(model: str) -> str:
    return "qkv_proj, o_proj" if "phi" in model else "q_proj, o_proj"


def test_sequences_are_shorter_only_if_neither_smaller_nor_shared_packs_help() -> None:
    role = "{model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}, zero: {stage: 3}}"
    ranks = "cluster: {ranks: 8}\n"
    long = job_config("sft", role, tokens=131_072, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(long, "8xA100-40GB"))
    lengths = [way for way in settings_of(problem.fix) if "data.max_tokens" in way]
    assert [way["data.max_tokens"] < 131_072 for way in lengths] == [True]
    more = job_config("sft", role, tokens=65_536, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(more, "8xA100-40GB"))
    ways = [*settings_of(problem.fix)]
    assert {"cluster.sequence_parallel": 2, "batch.micro_batch_tokens": 32768} in ways


def test_frozen_weights_that_are_too_large_are_quantised_or_offloaded() -> None:
    role = "{model: {path: microsoft/phi-4, gradient_checkpointing: true}, adapter: {rank: 16}}"
    [problem] = lacking(plan(job_config("sft", role), "A10"))
    assert "actor's weights" in problem.why
    assert [*settings_of(problem.fix)] == [
        {"actor.zero.parameter_offload": "cpu", "actor.zero.stage": 3},
        {"actor.model.quantization": "nf4"},
    ]


def test_a_share_that_no_engine_could_start_with_is_not_advised() -> None:
    text = (
        "rollout: {vllm: {memory_share: 0.75, sleep_level: 1}, placement: shared}\n"
        "algorithm: {kl: none}\n"
    )
    role = (
        "{model: {path: Qwen/Qwen2.5-7B, quantization: nf4, gradient_checkpointing: true}, "
        "adapter: {rank: 16}}"
    )
    config = job_config("ppo", role, tokens=512, further=text)
    [problem] = lacking(plan(config, "RTX4090"))
    assert problem.code == "vllm-share-beside-training"
    shares = [way.get("rollout.vllm.memory_share", 1) for way in settings_of(problem.fix)]
    assert shares and min(shares) > 0.6  # vLLM's weights; what the ranks leave is less


def test_a_model_too_large_for_a_whole_card_is_divided_over_several() -> None:
    text = "rollout: {vllm: {memory_share: 0.9}, placement: own}\ncluster: {ranks: 1}\n"
    role = "{model: {path: Qwen/Qwen2.5-14B}, zero: {stage: 3, parameter_offload: cpu}"
    role += ", adapter: {rank: 16}}"
    divided = {"rollout.vllm.tensor_parallel": 2}
    narrow = {"rollout.vllm.arguments.quantization": "fp8_per_channel"}
    for cards, ways in (("4xRTX4090", [divided, narrow]), ("2xRTX4090", [narrow])):
        [problem] = lacking(plan(job_config("ppo", role, further=text), cards))
        assert problem.code == "vllm-share" and [*settings_of(problem.fix)] == ways


_RANKS, _NODES, _ENGINES = "cluster.ranks", "cluster.nodes", "rollout.engines"
_OWN = "cluster.own_nodes"
_PARALLEL, _PLACEMENT = "rollout.vllm.tensor_parallel", "rollout.placement"


@pytest.mark.parametrize(
    ("ranks", "rollout", "ways"),
    [
        (4, "engines: 1", [{_PLACEMENT: "shared"}, {_RANKS: 3}, {_NODES: 2}]),
        (8, "placement: shared", [{_RANKS: 4}, {_RANKS: 3, _PLACEMENT: "own"}, {_NODES: 2}]),
        (
            2,
            "placement: shared, engines: 4",
            [
                {_ENGINES: 1, _PARALLEL: 2},
                {_RANKS: 4},
                {_ENGINES: 2},
                {_NODES: 2, "cluster.critic_ranks": 2, f"{_OWN}.actor": 1, f"{_OWN}.critic": 1},
            ],
        ),
        (
            2,
            "placement: shared, vllm: {tensor_parallel: 4}",
            [{_ENGINES: 2, _PARALLEL: 1}, {_RANKS: 4}, {_NODES: 2, _RANKS: 8}],
        ),
        (
            2,
            "placement: shared, vllm: {pipeline_parallel: 4}",
            [{_RANKS: 4}, {_NODES: 2, _RANKS: 8}],
        ),
    ],
)
def test_of_too_few_cards_only_what_helps_is_named(
    ranks: int, rollout: str, ways: list[dict[str, Any]]
) -> None:
    text = f"cluster: {{ranks: {ranks}}}\nrollout: {{{rollout}}}\n"
    role = "{model: {path: Qwen/Qwen2.5-0.5B}}"
    problems = plan(job_config("ppo", role, further=text), "4xA100-80GB").problems
    [fix] = [one.fix for one in problems if one.code == "more-ranks-than-gpus"]
    assert [*settings_of(fix)] == ways


def test_what_there_is_one_of_cannot_be_fewer() -> None:
    role = "{model: {path: Qwen/Qwen2.5-0.5B}}"
    config = job_config("sft", role)
    none, no_model = "run.keep_checkpoints: 0", "run.save_model: false"
    trial = f"{none} and {no_model} (a trial that saves nothing), or "
    fixes: list[tuple[dict[str, object], str]] = [
        ({"run.keep_checkpoints": 1}, trial),
        ({"run.keep_checkpoints": 2}, f"fewer run.keep_checkpoints, or {trial}"),
        ({"run.keep_checkpoints": 0}, f"{no_model} (a trial that saves nothing), or "),
        (
            {"run.keep_checkpoints": 1, "run.save_model": False},
            f"{none} (a trial that saves nothing), or ",
        ),
    ]
    for changes, fix in fixes:
        run = written(config, changes)
        assert run is not None
        ground = Ground(parse_cluster("H200", 1, 10**12), free_disk=1)
        [problem] = make_plan(run, ground).problems
        assert problem.fix == f"{fix}a run.directory on a larger disk"


def test_a_run_in_one_process_is_not_told_to_part_its_roles() -> None:
    text = "cluster: {where: local}\nrollout: {transformers: {}}\n"
    role = "{model: {path: Qwen/Qwen2.5-7B}, zero: {stage: 2, optimizer_offload: cpu}}"
    found = plan(job_config("ppo", role, further=text), "H200", host=10**11)
    [problem] = [one for one in lacking(found) if one.code == "host-memory"]
    assert "critic_ranks" not in problem.fix


ON_ONE_CARD = """\
run: {directory: out, steps: 10}
cluster: {ranks: 1}
data: {train: {path: x, prompt: q, reference: a}, max_tokens: 512}
batch: {prompts: 16, responses: 8, micro_batch_tokens: 4096}
actor:
  model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}
  adapter: {rank: 16}
rewards: {correct: {name: math_answer}}
rollout: {placement: shared}
"""


def test_grpo_of_7b_on_a_card_of_24_gb_is_told_ways_that_fit() -> None:
    """Two errors: a share with which no engine starts, and one that leaves the ranks no room."""
    config, _ = job_spec(JOBS["grpo"], read_tree(ON_ONE_CARD, "grpo.yaml"))
    problems = lacking(plan(config, "RTX4090"))
    assert {one.code for one in problems} == {"vllm-share", "vllm-share-beside-training"}
    for way in [way for problem in problems for way in settings_of(problem.fix)]:
        made = written(config, way)
        assert made is not None and plan(made, "RTX4090").verdict != "does not fit", way
