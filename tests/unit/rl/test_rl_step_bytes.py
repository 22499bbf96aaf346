"""What a step holds in the process that runs the loop and in Ray's store is what the plan says."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from plimsoll.cluster.protocol import Cluster, Pending
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import ADVANTAGES, RETURNS, Prompt, RewardPart, Trajectory, cut, single_turn
from plimsoll.rl.batch import (
    estimate_advantages,
    pack_batch,
    policy_columns,
    score_batch,
    with_columns,
)
from plimsoll.run.trajectories import write_trajectories
from plimsoll.sampler.price import step_item

PROMPT, RESPONSE, GROUP = 64, 4096, 8
ROLE = {"model": {"path": "m"}}


class PlainCluster:
    """Two ranks that give every token the same score."""

    streams = 2
    own_groups: Mapping[str, Any] = {}

    def call(self, task: object, per_stream: Iterable[tuple[Any, ...]]) -> Pending[Any]:
        answers = [
            [np.full(pack.loss_tokens, -1, np.float32) for pack in chain(*minis)]
            for _, *minis in per_stream
        ]
        return Pending(lambda: answers)


def episodes(prompts: int) -> list[Trajectory]:
    return [
        single_turn(
            prompt,
            sample,
            np.arange(RESPONSE),
            np.full(RESPONSE, -1.0 - sample, np.float32),
            f"{sample:4d} " * RESPONSE,
            "stop",
            3,
            (RewardPart("length", float(sample)),),
            group=prompt.index,
        )
        for prompt in (Prompt(i, np.arange(PROMPT, dtype=np.int32), "?") for i in range(prompts))
        for sample in range(GROUP)
    ]


def written_bytes(directory: Path, kept: Sequence[Trajectory]) -> int:
    """Return the most bytes that Arrow holds while it writes the trajectories."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        write_trajectories(directory / "step.parquet", 1, kept)
        return int(pool.max_memory())
    finally:
        pa.set_memory_pool(usual)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"advantage": {"name": "grpo"}, "kl": {"place": "loss"}}},
        {"algorithm": {"mini_batches": 2}, "critic": ROLE},
    ],
)
def test_a_steps_bytes_are_those_of_the_plan(changes: Mapping[str, Any], tmp_path: Path) -> None:
    batch = {"prompts": 4, "responses": GROUP, "micro_batch_tokens": 20_000, "share_prompts": True}
    spec = spec_of(
        RlConfig.model_validate(
            {
                "run": {"directory": "runs/x", "steps": 2},
                "data": {"train": {"path": "x.jsonl", "prompt": "p"}, "max_tokens": PROMPT},
                "batch": batch,
                "actor": ROLE,
                "rewards": {"length": {"name": "length"}},
                "rollout": {"sampling": {"max_new_tokens": RESPONSE}},
                **changes,
            }
        )
    )
    assert spec.sampling is not None
    tracemalloc.start()
    sampled = episodes(4)
    packed = pack_batch(sampled, spec, 2, 2, 1)
    scores = score_batch(packed, spec, cast(Cluster, PlainCluster()))
    columns = {**scores, **estimate_advantages(packed, scores, spec.config.algorithm, 0.1, {})}
    kept = with_columns(sampled, packed, columns)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept) == len(sampled)
    of_torch = [array for c in (ADVANTAGES, RETURNS) for array in columns.get(c, ())]
    held += sum(array.nbytes for array in of_torch)  # which is not traced
    held += written_bytes(tmp_path, kept)
    planned = step_item(spec, spec.sampling, in_store=False).bytes
    assert held == pytest.approx(planned, rel=0.05)

    packs = [pack for mini in packed.minis for own in mini.packs for pack in own]
    of_loss = policy_columns(columns, kl_loss="critic" not in changes)
    sent = [packs, [t.response_text for t in sampled], [cut(of_loss, pack) for pack in packs]]
    planned = step_item(spec, spec.sampling, in_store=True).bytes
    assert len(pickle.dumps(sent)) <= planned * 1.05


def test_experts_that_engines_return(tmp_path: Path) -> None:
    """4 layers of 8 experts for each token: in trajectories, in packs, and in rows that are written
    as NumPy's files, which Python holds beside Arrow's table of them."""
    routing = 32
    batch = {"prompts": 4, "responses": GROUP, "micro_batch_tokens": 20_000}
    config = {
        "run": {"directory": "runs/x", "steps": 2},
        "data": {"train": {"path": "x.jsonl", "prompt": "p"}, "max_tokens": PROMPT},
        "batch": batch,
        "actor": ROLE,
        "rewards": {"length": {"name": "length"}},
        "rollout": {"sampling": {"max_new_tokens": RESPONSE}, "routing": "sampled"},
        "algorithm": {"advantage": {"name": "grpo"}},
    }
    spec = spec_of(RlConfig.model_validate(config))
    assert spec.sampling is not None
    rng = np.random.default_rng(0)
    plain = episodes(4)
    tracemalloc.start()
    shape = PROMPT + RESPONSE - 1, 4, 8
    sampled = [replace(t, routing=rng.integers(0, 128, shape, dtype=np.uint8)) for t in plain]
    packed = pack_batch(sampled, spec, 2, 2, 1)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    without = pack_batch(plain, spec, 2, 2, 1)
    sent = [
        pickle.dumps([s, *(mini.packs for mini in p.minis)])
        for s, p in ((sampled, packed), (plain, without))
    ]

    def planned(in_store: bool) -> int:
        assert spec.sampling is not None
        whole, bare = (
            step_item(spec, spec.sampling, in_store=in_store, routing=each).bytes
            for each in (routing, 0)
        )
        return whole - bare

    written = written_bytes(tmp_path, sampled) - written_bytes(tmp_path, plain)
    ids = 4 * (PROMPT + RESPONSE) * len(sampled)
    assert held + 2 * written == pytest.approx(planned(in_store=False) + ids, rel=0.05)
    assert len(sent[0]) - len(sent[1]) == pytest.approx(planned(in_store=True), rel=0.05)
