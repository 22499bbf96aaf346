"""What a plan says to write instead: it can be written, and the memory that lacked becomes less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll.config.load import validate
from plimsoll.config.problems import Problem as PlanProblem
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise.changes import Change, changed, value_at
from plimsoll.memory.plan.plan import Ground, Plan, make_plan
from plimsoll.spec.run_spec import RunSpec

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
    return spec_of(
        validate(JOBS[job].config, read_tree(text + FURTHER.get(job, "") + further, f"{job}.yaml"))
    )


def plan(config: RunSpec[Any], cluster: str, host: int = 10**12) -> Plan:
    return make_plan(config, Ground(parse_cluster(cluster, config.cluster.nodes, host)))


def lacking(found: Plan) -> list[PlanProblem]:
    codes = ("device-memory", "host-memory", "vllm-share", "vllm-share-beside-training")
    return [one for one in found.problems if one.severity == "error" and one.code in codes]


def settings_of(fix: str) -> Iterator[dict[str, Any]]:
    """Of each way that is keys with values; an adapter is given a rank."""
    for way in fix.replace(".adapter", ".adapter.rank: 8").split(", or "):
        pairs = [re.fullmatch(r"([\w.]+): (\S+)", part) for part in way.split(" with ")]
        if all(pairs):
            yield {pair[1]: yaml.safe_load(pair[2]) for pair in pairs if pair}


def written(config: RunSpec[Any], values: dict[str, Any]) -> RunSpec[Any] | None:
    return changed(config, [Change(k, value_at(config, k), v) for k, v in values.items()])


def bytes_of(found: Plan, problem: PlanProblem) -> int:
    """Of what is too small, in the phase that the problem names."""
    named = re.search(r" in (\w+) \(", problem.what)
    stores = found.hosts if problem.code == "host-memory" else found.devices
    uses = [use for store in stores for use in store.phases]
    return max(use.bytes for use in uses if named is None or use.moment.phase == named[1])


@settings(max_examples=80, deadline=None)
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
def test_what_is_advised_can_be_written_and_helps(
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
    engines = f"engines: {ranks}, placement: shared, memory_share: 0.5, sleep_level: {level}"
    further = f"cluster: {{ranks: {ranks}}}\n"
    further += f"rollout: {{{engines}}}\n" if job == "ppo" else ""
    config = job_config(job, role, micro_batch=micro_batch, further=further)
    before = plan(config, cluster, host)
    for problem in lacking(before):
        for values in settings_of(problem.fix):
            better = written(config, values)
            assert better is not None, f"{values} contradicts the rest: {problem}"
            after = plan(better, cluster, host)
            if "rollout.placement" not in values:
                assert bytes_of(after, problem) < bytes_of(before, problem), (values, problem)
            if "rollout.memory_share" in values:
                assert not any(one.code == "vllm-share" for one in after.problems), problem


def _targets(model: str) -> str:
    return "qkv_proj, o_proj" if "phi" in model else "q_proj, o_proj"


def test_a_micro_batch_of_one_sequence_cannot_be_smaller() -> None:
    role = "{model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}, zero: {stage: 3}}"
    ranks = "cluster: {ranks: 8}\n"
    long = job_config("sft", role, tokens=131_072, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(long, "8xA100-40GB"))
    assert problem.fix == (
        "shorter sequences (data.max_tokens = 131072), and batch.micro_batch_tokens with them, or "
        "actor.model.activation_offload: cpu"
    )
    more = job_config("sft", role, tokens=65_536, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(more, "8xA100-40GB"))
    assert problem.fix.startswith("a smaller batch.micro_batch_tokens (now 131,072), or")


def test_frozen_weights_that_are_too_large_are_quantised_or_offloaded() -> None:
    role = "{model: {path: microsoft/phi-4, gradient_checkpointing: true}, adapter: {rank: 16}}"
    [problem] = lacking(plan(job_config("sft", role), "A10"))
    assert "actor's weights" in problem.why
    assert problem.fix == (
        "actor.model.quantization: nf4, or actor.zero.parameter_offload: cpu with "
        "actor.zero.stage: 3"
    )


def test_a_share_that_no_engine_could_start_with_is_not_advised() -> None:
    text = (
        "rollout: {placement: shared, memory_share: 0.75, sleep_level: 1}\n"
        "algorithm: {kl: {place: none}}\n"
    )
    role = (
        "{model: {path: Qwen/Qwen2.5-7B, quantization: nf4, gradient_checkpointing: true}, "
        "adapter: {rank: 16}}"
    )
    config = job_config("ppo", role, tokens=512, further=text)
    [problem] = lacking(plan(config, "RTX4090"))
    assert problem.code == "vllm-share-beside-training"
    assert "memory_share" not in problem.fix  # what the ranks leave is less than vLLM's weights
    assert "rollout.placement: own with rollout.sleep_level: 0 with more cluster.nodes" in (
        problem.fix
    )


def test_a_model_too_large_for_a_whole_card_is_divided_over_several() -> None:
    text = "rollout: {placement: own, memory_share: 0.5}\ncluster: {ranks: 1}\n"
    role = "{model: {path: Qwen/Qwen2.5-14B}, adapter: {rank: 16}, zero: {stage: 3}}"
    found = plan(job_config("ppo", role, further=text), "2xRTX4090")
    [problem] = [one for one in lacking(found) if one.code == "vllm-share"]
    assert problem.fix == "a larger rollout.tensor_parallel (now 1)"
