"""What a plan says to write instead: it can be written, and the memory that lacked becomes less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll.config.load import validate
from plimsoll.config.problems import Problem
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise.engine_moves import narrow_engines
from plimsoll.memory.advise.moves import saving_moves
from plimsoll.memory.contents.stores import verdict_of
from plimsoll.memory.plan.plan import BAND, Ground, Plan, make_plan, weigh
from plimsoll.memory.remedies.changes import Change, changed, changes_between, value_at
from plimsoll.memory.remedies.top_consumer import find_top_consumer
from plimsoll.memory.rules.ways_out import OTHERS_STAY
from plimsoll.spec.load import spec_of as job_spec
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


def lacking(found: Plan) -> list[Problem]:
    codes = ("device-memory", "host-memory", "vllm-share", "vllm-share-beside-training")
    return [one for one in found.problems if one.severity == "error" and one.code in codes]


def settings_of(fix: str) -> Iterator[dict[str, Any]]:
    """Of each way that is keys with values."""
    for way in fix.replace(" or more", "").removesuffix(OTHERS_STAY).split(", or "):
        pairs = [re.fullmatch(r"([\w.]+): (\S+)", part) for part in way.split(" with ")]
        if all(pairs):
            yield {pair[1]: yaml.safe_load(pair[2]) for pair in pairs if pair}


def written(config: RunSpec[Any], values: dict[str, Any]) -> RunSpec[Any] | None:
    return changed(config, [Change(k, value_at(config.config, k), v) for k, v in values.items()])


def errors(found: Plan) -> set[str | None]:
    return {one.code for one in found.problems if one.severity == "error"}


@settings(max_examples=40, deadline=None)
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


ELSEWHERE = ("run.directory", "cluster.hardware", "cluster.device")
"""What no move can know: a larger disk, other machines."""


@settings(max_examples=80, deadline=None)
@given(
    job=st.sampled_from(sorted(ROWS)),
    model=st.sampled_from(["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"]),
    stage=st.integers(0, 3),
    level=st.integers(0, 2),
    placement=st.sampled_from(["own", "shared"]),
    engine=st.sampled_from(["vllm", "transformers"]),
    engines=st.sampled_from([1, 4]),
    cache=st.sampled_from([0.01, 4, 400]),
    ranks=st.sampled_from([1, 4, 8]),
    cluster=st.sampled_from(["4xRTX4090", "8GB", "4xA100-80GB", "cpu"]),
    host=st.sampled_from([10**9, 3 * 10**10, 10**12]),
    disk=st.sampled_from([1, 10**14]),
)
def test_what_an_error_names_is_among_what_suggestions_try(
    job: str,
    model: str,
    stage: int,
    level: int,
    placement: str,
    engine: str,
    engines: int,
    cache: float,
    ranks: int,
    cluster: str,
    host: int,
    disk: int,
) -> None:
    """Every key of a fix is one that some move changes, for this very config; and where a remedy
    has a value, some move writes it."""
    where = "ray" if ranks > 1 or engine == "vllm" else "local"
    engines = min(engines, ranks) if placement == "shared" or where == "local" else engines
    level = level if placement == "shared" and engine == "vllm" else 0
    further = f"cluster: {{ranks: {ranks}, where: {where}}}\n"
    if job == "ppo":
        vllm = f"{{sleep_level: {level}, cpu_kv_cache_gib: {cache}}}"
        further += (
            f"rollout: {{engines: {engines}, placement: {placement}, "
            f"{engine}: {vllm if engine == 'vllm' else '{}'}}}\n"
        )
    role = f"{{model: {{path: {model}}}, zero: {{stage: {stage}}}}}"
    config = job_config(job, role, further=further)
    ground = Ground(parse_cluster(cluster, 1, host), free_disk=disk)
    weighed = weigh(config, ground)
    made = (*saving_moves(weighed), *narrow_engines(weighed))
    moves = [changes_between(config, move) for move in made]
    tried = {change.key for move in moves for change in move}
    found = make_plan(config, ground)
    overfull = [
        one for one in (*found.devices, *found.hosts) if verdict_of(one, BAND) == "does not fit"
    ]
    values = {(change.key, change.after) for move in moves for change in move}
    for store in overfull:
        for remedy in find_top_consumer(store, config).remedies:
            assert values >= {*remedy.changes.items()}, remedy
    for problem in found.problems:
        if problem.severity == "error" and not problem.is_conflict:
            for key in named(problem.fix, on_cards=cluster != "cpu"):
                assert any(f"{one}.".startswith(f"{key}.") for one in tried), (key, problem)


def named(fix: str, *, on_cards: bool) -> Iterator[str]:
    """Keys of a fix, but for lengths, which another search shortens, those that only another
    machine has a value for, and those that save nothing, which is the user's to choose."""
    fix = re.sub(r"run\.[^,]* \(a trial that saves nothing\)", "", fix)
    fix = re.sub(r"shorter sequences \([^)]*\), and batch.micro_batch_tokens with them", "", fix)
    if on_cards:
        fix = re.sub(r"on CPU a smaller rollout.vllm.cpu_kv_cache_gib", "", fix)
    for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]\w*)+", fix):
        if not key.startswith(ELSEWHERE):
            yield key


def _targets(model: str) -> str:
    return "qkv_proj, o_proj" if "phi" in model else "q_proj, o_proj"


def test_a_micro_batch_of_one_sequence_cannot_be_smaller() -> None:
    role = "{model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}, zero: {stage: 3}}"
    ranks = "cluster: {ranks: 8}\n"
    long = job_config("sft", role, tokens=131_072, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(long, "8xA100-40GB"))
    assert problem.fix == (
        "shorter sequences (data.max_tokens = 131072), and batch.micro_batch_tokens with them"
    )  # not the offload of layer inputs, after which it does not fit either
    more = job_config("sft", role, tokens=65_536, micro_batch=131_072, further=ranks)
    [problem] = lacking(plan(more, "8xA100-40GB"))
    assert problem.fix == (
        "actor.model.activation_offload: cpu with batch.micro_batch_tokens: 65536"
    )


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
    assert "memory_share" not in problem.fix  # what the ranks leave is less than vLLM's weights
    assert (
        "rollout.placement: own with rollout.vllm.sleep_level: 0 with cluster.nodes: 2"
        in problem.fix
    )


def test_a_model_too_large_for_a_whole_card_is_divided_over_several() -> None:
    text = "rollout: {vllm: {memory_share: 0.9}, placement: own}\ncluster: {ranks: 1}\n"
    role = "{model: {path: Qwen/Qwen2.5-14B}, zero: {stage: 3, parameter_offload: cpu}"
    role += ", adapter: {rank: 16}}"
    [problem] = lacking(plan(job_config("ppo", role, further=text), "4xRTX4090"))
    assert problem.code == "vllm-share"
    narrow = "rollout.vllm.arguments.quantization: fp8_per_channel"
    assert problem.fix == f"{narrow}, or rollout.vllm.tensor_parallel: 2"
    [problem] = lacking(plan(job_config("ppo", role, further=text), "2xRTX4090"))
    assert problem.fix == narrow  # no card for a second part


@pytest.mark.parametrize(
    ("ranks", "rollout", "fix"),
    [
        (4, "engines: 1", "fewer cluster.ranks, rollout.placement: shared, or more cluster.nodes"),
        (
            1,
            "engines: 4",
            "fewer rollout.engines, rollout.placement: shared, or more cluster.nodes",
        ),
        (8, "placement: shared", "fewer cluster.ranks, or more cluster.nodes"),
        (2, "placement: shared, engines: 4", "fewer rollout.engines, or more cluster.ranks"),
        (
            2,
            "placement: shared, vllm: {tensor_parallel: 4}",
            "fewer parts of an engine (rollout.vllm.tensor_parallel), or more cluster.ranks",
        ),
        (
            2,
            "placement: shared, vllm: {pipeline_parallel: 4}",
            "fewer parts of an engine (rollout.vllm.tensor_parallel x "
            "rollout.vllm.pipeline_parallel), or more cluster.ranks",
        ),
    ],
)
def test_of_too_few_cards_only_what_helps_is_named(ranks: int, rollout: str, fix: str) -> None:
    text = f"cluster: {{ranks: {ranks}}}\nrollout: {{{rollout}}}\n"
    role = "{model: {path: Qwen/Qwen2.5-0.5B}}"
    problems = plan(job_config("ppo", role, further=text), "4xA100-80GB").problems
    assert [one.fix for one in problems if one.code == "more-ranks-than-gpus"] == [fix]


def test_an_engine_beside_ranks_may_start_in_smaller_parts() -> None:
    text = (
        "rollout: {vllm: {memory_share: 0.4}, placement: shared, engines: 4}\ncluster: {ranks: 4}\n"
    )
    role = "{model: {path: Qwen/Qwen2.5-7B}, adapter: {rank: 16}, zero: {stage: 3}}"
    found = plan(job_config("ppo", role, further=text), "4xRTX4090")
    [problem] = [one for one in lacking(found) if one.code == "vllm-share"]
    assert "rollout.vllm.tensor_parallel: 4 with rollout.engines: 1" in problem.fix
    alone = plan(job_config("ppo", role, further=text), "RTX4090")
    [problem] = [one for one in lacking(alone) if one.code == "vllm-share"]
    assert "tensor_parallel" not in problem.fix  # an engine's cards are of one node


def test_what_there_is_one_of_cannot_be_fewer() -> None:
    role = "{model: {path: Qwen/Qwen2.5-0.5B}}"
    config = job_config("sft", role)
    none, no_model = "run.keep_checkpoints: 0", "run.save_model: false"
    trial = f"{none} and {no_model} (a trial that saves nothing), or "
    fixes: list[tuple[dict[str, object], str]] = [
        ({"run.keep_checkpoints": 1}, trial),
        ({"run.keep_checkpoints": 2}, f"fewer run.keep_checkpoints, {trial}"),
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
    ways = [way for problem in problems for way in settings_of(problem.fix)]
    narrow = {
        "actor.model.quantization": "nf4",
        "rollout.vllm.arguments.quantization": "fp8_per_channel",
    }
    assert narrow in ways and len(ways) >= 4
    for way in ways:
        made = written(config, way)
        assert made is not None and plan(made, "RTX4090").verdict != "does not fit", way


@pytest.mark.parametrize("job", ["sft", "ppo", "dpo"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("adapter", ["", ", adapter: {rank: 16}"])
@pytest.mark.parametrize("cluster", ["RTX4090", "2xA10", "4xRTX4090"])
def test_whatever_a_refusal_says_mends_it(job: str, model: str, adapter: str, cluster: str) -> None:
    role = f"{{model: {{path: {model}}}, zero: {{stage: 2}}{adapter}}}"
    ranks = int(cluster[0]) if cluster[0].isdigit() else 1
    further = f"cluster: {{ranks: {ranks}}}\n"
    further += f"rollout: {{placement: shared, engines: {ranks}}}\n" if job == "ppo" else ""
    config = job_config(job, role, micro_batch=8192, further=further)
    before = plan(config, cluster, 128 * 10**9)
    for problem in lacking(before):
        for values in settings_of(problem.fix):
            made = written(config, values)
            assert made is not None, (values, problem)
            after = errors(plan(made, cluster, 128 * 10**9))
            assert problem.code not in after and after <= errors(before), (values, problem)
