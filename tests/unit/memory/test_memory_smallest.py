"""The smallest change: nothing of a grid that fits asks for less, and what is suggested can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest

from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.machine.hardware import Hardware, parse_cluster
from plimsoll.memory.advise.advise import Advice, advise
from plimsoll.memory.advise.states import Site, Size, part_of
from plimsoll.memory.advise.suggestion import Suggestion
from plimsoll.memory.plan.plan import Ground, make_plan
from plimsoll.memory.remedies.changes import changed, changes_between
from plimsoll.spec.run_spec import RunSpec, resolve

RUN = """\
run: {{directory: out, steps: 10}}
cluster: {{ranks: {ranks}}}
"""
ROLE = """
  model: {{path: {model}, gradient_checkpointing: {checkpointing}}}
  zero: {{stage: {stage}}}
"""
SFT = f"""{RUN}data: {{{{train: {{{{path: x, prompt: q, response: a}}}}, max_tokens: 1024}}}}
batch: {{{{sequences: 64, micro_batch_tokens: 8192}}}}
actor:{ROLE}"""
DPO = SFT.replace("response: a", "chosen: a, rejected: b").replace("sequences", "pairs")
PPO = f"""{RUN}data: {{{{train: {{{{path: x, prompt: q, reference: a}}}}, max_tokens: 512}}}}
batch: {{{{prompts: 64, responses: 2, micro_batch_tokens: 8192}}}}
actor:{ROLE}critic:{ROLE}rewards: {{{{correct: {{{{name: math_answer}}}}}}}}
rollout: {{{{sampling: {{{{max_new_tokens: 1024}}}}}}}}
"""
TEXTS = {"sft": SFT, "dpo": DPO, "ppo": PPO}
CASES = [
    # job, model, ranks, stage, checkpointing, cards, GB of host
    ("sft", "Qwen/Qwen2-7B", 1, 2, "false", "4xA10", 60),
    ("sft", "Qwen/Qwen2-7B", 4, 0, "false", "4xA10", 60),
    ("sft", "Qwen/Qwen2-7B", 4, 3, "true", "4xRTX4090", 256),
    ("sft", "Qwen/Qwen2.5-1.5B", 1, 2, "true", "RTX4090", 60),
    ("dpo", "Qwen/Qwen2.5-1.5B", 1, 2, "false", "4xA10", 60),
    ("dpo", "Qwen/Qwen2-7B", 4, 3, "true", "4xA100-40GB", 256),
    ("ppo", "Qwen/Qwen2.5-7B", 4, 2, "false", "4xRTX4090", 128),
    ("ppo", "Qwen/Qwen2.5-7B", 4, 2, "false", "4xRTX4090", 512),
    ("ppo", "Qwen/Qwen2.5-1.5B", 8, 2, "true", "4xRTX4090", 256),
]
Case = tuple[str, str, int, int, str, str, int]


def spec_of(case: Case) -> tuple[RunSpec[Any], Ground]:
    job, model, ranks, stage, checkpointing, cards, host = case
    text = TEXTS[job].format(ranks=ranks, model=model, stage=stage, checkpointing=checkpointing)
    config = validate(JOBS[job].config, read_tree(text, f"{job}.yaml"))
    return resolve(JOBS[job], config), Ground(parse_cluster(cards, 1, host * 10**9))


def grid(spec: RunSpec[Any]) -> Iterator[Mapping[str, Any]]:
    """Settings of a few levers, each as it is or otherwise."""
    roles = list(spec.trained)

    def each(**values: Any) -> dict[str, Any]:
        return {f"{role}.{k.replace('__', '.')}": v for role in roles for k, v in values.items()}

    axes: list[list[dict[str, Any]]] = [
        [{}, {"batch.micro_batch_tokens": 4096}, {"batch.micro_batch_tokens": 2048}],
        [{}, each(zero__stage=3), each(zero__stage=3, zero__parameter_offload="cpu")],
        [{}, each(model__gradient_checkpointing=True)],
        [{}, each(zero__optimizer_offload="cpu")],
        [{}, each(adapter__rank=16), each(adapter__rank=16, model__quantization="nf4")],
    ]
    if spec.sampling is not None:
        shared = {"rollout.placement": "shared", "cluster.ranks": 4}
        axes[0] = axes[0][:2]
        axes.append(
            [
                {},
                {**shared, "rollout.vllm.tensor_parallel": 2, "rollout.vllm.sleep_level": 2},
                {**shared, "rollout.vllm.tensor_parallel": 4, "rollout.vllm.memory_share": 0.28},
            ]
        )
    for combination in product(*axes):
        yield {key: value for values in combination for key, value in values.items()}


def needed(site: Site, values: Mapping[str, Any]) -> Iterator[Size]:
    """How much a config of the grid asks for that fits better than the root, without the changes
    that it does as well without."""
    state = site.tried(frozenset(changes_between(site.spec, values)))
    if state is None or state.rank >= site.root.rank or state.idles_beside(site.root):
        return
    for part in sorted(set(map(part_of, state.changes))):
        fewer = site.tried(frozenset(c for c in state.changes if part_of(c) != part))
        state = state if fewer is None or fewer.rank > state.rank else fewer
    yield state.size(site.root)


@cache
def advice_of(case: Case) -> Advice:
    return advise(*spec_of(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_of_a_grid_that_fits_asks_for_less(case: Case) -> None:
    """But for estimated speeds that are about the same."""
    site = Site(*spec_of(case))
    [marked] = [one for one in advice_of(case).suggestions if one.smallest]
    smallest = site.tried(frozenset(marked.changes))
    assert smallest is not None
    sizes = [size for values in grid(site.spec) for size in needed(site, values)]
    assert sizes and smallest.size(site.root)[:-1] <= min(sizes)[:-1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_suggestion_is_refused_and_no_two_are_alike(case: Case) -> None:
    spec, ground = spec_of(case)
    suggestions = advice_of(case).suggestions
    for one in suggestions:
        made = changed(spec, one.changes)
        assert made is not None
        machines = Hardware(ground.hardware.nodes * made.cluster.nodes)
        plan = make_plan(made, Ground(machines))
        assert plan.verdict == one.verdict != "does not fit", plan.problems
    changed_parts = {frozenset(map(part_of, one.changes)) for one in suggestions}
    assert len(changed_parts) == len(suggestions) > 0
    places = [on_more_machines(one) for one in suggestions]
    assert places == sorted(places)


def on_more_machines(one: Suggestion) -> bool:
    return any(change.key == "cluster.nodes" for change in one.changes)


@pytest.mark.parametrize("host", [128, 512])
def test_ppo_on_four_small_cards_is_told_what_fits_on_these(host: int) -> None:
    """Offload with enough host memory, else adapters; and one engine over several cards, as its
    weights and the ranks' are too much for one."""
    advice = advice_of(("ppo", "Qwen/Qwen2.5-7B", 4, 2, "false", "4xRTX4090", host))
    [smallest] = [one for one in advice.suggestions if one.smallest]
    assert smallest.verdict == "fits" and not on_more_machines(smallest)
    assert "--rollout.vllm.tensor_parallel" in smallest.flags
    assert ("adapter.rank" in smallest.flags) == (host == 128)
    assert "quantization" not in smallest.flags


def test_another_machine_is_asked_for_only_where_these_will_not_do() -> None:
    small = advice_of(("sft", "Qwen/Qwen2-7B", 4, 3, "true", "4x12GB", 30))
    assert small.suggestions[0].effect == "method" and not on_more_machines(small.suggestions[0])
    larger = advice_of(("sft", "Qwen/Qwen2.5-72B", 4, 3, "true", "4x10GB", 30))
    assert larger.suggestions and all(map(on_more_machines, larger.suggestions))
