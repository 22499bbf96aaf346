"""What is asked for more makes no phase's peak lower, and what saves memory makes none higher."""

from __future__ import annotations

from typing import Any

import pytest
from examples import percent
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import read_spec

from plimsoll.config.rl import RlConfig
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.levers.trials import apply_changes, changes_between
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.shapes.known_models import known_models

COLUMNS = {
    "sft": "prompt: q, response: a",
    "prm": "prompt: q, steps: s, labels: l",
    "rm": "prompt: q, chosen: a, rejected: b",
    "dpo": "prompt: q, chosen: a, rejected: b",
    "kto": "prompt: q, response: a, label: l",
    "distill": "prompt: q, response: a",
    "ppo": "prompt: q",
}
BATCH = {"dpo": "pairs", "rm": "pairs", "ppo": "prompts"}

MORE = {
    "batch.micro_batch_tokens": 32_768,
    "data.max_tokens": 1500,
    "cluster.ranks": 2,  # of 4: each has a larger part
    "*.adapter.rank": 65,
    "*.model.head_chunk": 4096,
    "*.ema.decay": 0.99,
    "*.model.checkpoint_every": 2,
    "rollout.sync.bucket_bytes": 2**33,
}
"""Keys and values of which a card holds more, or as much."""
LESS = {
    "*.model.gradient_checkpointing": True,
    "*.model.activation_offload": "cpu",
    "*.zero.parameter_offload": "cpu",
    "batch.share_prompts": False,
    "rollout.vllm.memory_share": 0.2,
}
"""Keys and values of which a card holds less, or as much."""


def config(
    job: str, model: str, tuning: str, zero: str, computing: str, further: str
) -> RunSpec[Any]:
    role = f"{{model: {{path: {model}, {computing}}}, zero: {{{zero}}}{tuning}}}"
    text = (
        "run: {directory: out, steps: 10, eval_every: 5}\n"
        f"data: {{train: {{path: x, {COLUMNS[job]}}}, eval: {{path: y, {COLUMNS[job]}}}, "
        "max_tokens: 1024}\n"
        f"batch: {{{BATCH.get(job, 'sequences')}: 64, micro_batch_tokens: 4096}}\n"
        f"actor: {role}\n" + further
    )
    text += f"critic: {role}\nrewards: {{r: {{name: length}}}}\n" if job == "ppo" else ""
    text += "rollout: {vllm: {memory_share: 0.3}, placement: shared}\n" if job == "ppo" else ""
    text += (
        f"teacher: {{model: {{path: {model}}}, zero: {{stage: 3}}}}\n" if job == "distill" else ""
    )
    return read_spec(job, text)


def card_peaks(of: RunSpec[Any]) -> dict[str, int]:
    """Return the peaks of the fullest card in each phase."""
    found = make_plan(of, Ground(parse_cluster("4xA100-80GB", of.cluster.nodes, 10**13)))
    uses = sorted((use for store in found.devices for use in store.phases), key=lambda u: u.bytes)
    return {use.moment.phase: use.bytes for use in uses}


def fullest_card(of: RunSpec[Any]) -> int:
    return max(card_peaks(of).values())


def with_(of: RunSpec[Any], key: str, value: object) -> RunSpec[Any] | None:
    """Return the changed config; None if the job has no such key, or the settings contradict one
    another."""
    roles = ["actor", "critic"] if isinstance(of, RlConfig) else ["actor"]
    keys = [key.replace("*", role) for role in roles] if key.startswith("*") else [key]
    if key.startswith("*.adapter") and of.actor.adapter is None:
        return None
    try:
        values: dict[str, Any] = dict.fromkeys(keys, value)
        return apply_changes(of, changes_between(of, values))
    except AttributeError:
        return None


configs = st.builds(
    config,
    job=st.sampled_from(sorted(COLUMNS)),
    model=st.sampled_from(sorted(known_models())),
    tuning=st.sampled_from(["", "", ", adapter: {rank: 64}"]),
    zero=st.sampled_from(
        [
            *(f"stage: {stage}" for stage in range(4)),
            *(f"stage: {stage}, optimizer_offload: cpu" for stage in range(1, 4)),
        ]
    ),
    computing=st.sampled_from(
        [
            *(f"gradient_checkpointing: {how}" for how in ("true", "false", "selective")),
            "gradient_checkpointing: true, attention: sdpa",
            "gradient_checkpointing: true, dtype: float32",
        ]
    ),
    further=st.just("cluster: {ranks: 4}\n"),
)


@settings(max_examples=percent(15))
@given(of=configs, key=st.sampled_from(sorted(MORE)))
def test_more_of_something_leaves_no_card_emptier(of: RunSpec[Any], key: str) -> None:
    more = with_(of, key, MORE[key])
    assume(more is not None)
    assert more is not None
    scores = 0.999  # of longer sequences fewer make a pack, and each has one score
    before, after = card_peaks(of), card_peaks(more)
    assert not [phase for phase in before if after[phase] < scores * before[phase]]


@settings(max_examples=percent(15))
@given(of=configs, key=st.sampled_from(sorted(LESS)))
def test_what_saves_memory_leaves_no_card_fuller(of: RunSpec[Any], key: str) -> None:
    less = with_(of, key, LESS[key])
    assume(less is not None)
    assert less is not None
    before, after = card_peaks(of), card_peaks(less)
    assert not [phase for phase in before if after[phase] > before[phase]]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "meta-llama/Llama-2-70b-hf"])
def test_of_a_large_model_each_stage_divides_more(model: str) -> None:
    computing, ranks = "gradient_checkpointing: true", "cluster: {ranks: 4}\n"
    peaks = [
        fullest_card(config("sft", model, "", f"stage: {stage}", computing, ranks))
        for stage in range(4)
    ]
    assert peaks == sorted(peaks, reverse=True)
    adapted = [
        fullest_card(config("sft", model, tuning, "stage: 2", computing, ranks))
        for tuning in ("", ", adapter: {rank: 64}", ", adapter: {rank: 8}")
    ]
    assert adapted == sorted(adapted, reverse=True)
