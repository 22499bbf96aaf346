"""Advantages, losses and corrections that cannot go together are refused; the fix mends them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plimsoll.errors import PlimsollError
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec

CONFIG = {
    "run": {"directory": "out", "steps": 3},
    "data": {"train": {"path": "rows.jsonl", "prompt": "question"}},
    "actor": {"model": {"path": "model"}},
    "rewards": {"length": {"name": "length"}},
}
OWN = """
def misspelt(inputs, groups): ...
def strange(inputs, weather): ...
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG))
    Path("own_estimators.py").write_text(OWN)


# (flags that contradict, part of the refusal, flags that mend it)
CASES = [
    (
        "--cluster.device=cpu --rollout.sync.route=nccl",
        "rollout.sync.route: nccl",
        "--rollout.sync.route=host",
    ),
    (
        "--cluster.hardware=2xH100 --rollout.placement=own --rollout.sync.route=ipc",
        "here engines have cards of their own",
        "--rollout.sync.route=nccl",
    ),
    (
        "--cluster.hardware=H100 --rollout.placement=shared --rollout.sync.route=nccl",
        "each on a card of its own; here engines share the ranks' cards",
        "--rollout.sync.route=host",
    ),
    (
        "--algorithm.policy_loss.name=dppo_tv",
        "algorithm.correction: truncate",
        "--algorithm.correction=null",
    ),
    (
        "--algorithm.policy_loss.name=reinforce --algorithm.mini_batches=2",
        "algorithm.policy_loss: reinforce",
        "--algorithm.policy_loss.name=clip",
    ),
    (
        "--algorithm.aggregation_tokens=100",
        "algorithm.aggregation_tokens: 100",
        "--algorithm.aggregation=constant",
    ),
    (
        "--algorithm.kl.ratio_corrected=true",
        "algorithm.kl.ratio_corrected: true",
        "--algorithm.kl.place=loss",
    ),
    (
        "--algorithm.critic_mini_batches=2",
        "algorithm.critic_mini_batches: 2",
        "--algorithm.critic_mini_batches=null",
    ),
    ("--batch.responses=1", "batch.responses: 1", "--algorithm.advantage.name=reinforce_pp"),
    (
        "--batch.responses=1 --batch.dynamic_sampling={} --algorithm.advantage.name=reinforce",
        "batch.dynamic_sampling: given",
        "--batch.responses=8",
    ),
    ("--algorithm.mini_batches=5", "algorithm.mini_batches: 5", "--algorithm.mini_batches=4"),
    (
        "--algorithm.advantage.name=own_estimators:misspelt",
        "-> call it group_S, or put groups after a `*`",
        "--algorithm.advantage.name=grpo",
    ),
    (
        "--algorithm.advantage.name=own_estimators:strange",
        "-> put weather after a `*`",
        "--algorithm.advantage.name=grpo",
    ),
    (
        "--rollout.staleness=1 --algorithm.correction=null",
        "rollout.staleness: 1",
        "--algorithm.correction={name: truncate}",
    ),
    (
        "--rollout.staleness=1 --rollout.placement=shared",
        "rollout.placement: shared",
        "--rollout.staleness=0",
    ),
    (
        "--rollout.staleness=1 --rollout.transformers={} --rollout.vllm=null --cluster.where=local",
        "cluster.where: local",
        "--cluster.where=ray",
    ),
    (
        "--rollout.staleness=2 --actor.adapter={} --rollout.vllm.adapter=separate",
        "rollout.vllm.adapter: separate",
        "--rollout.vllm.adapter=merged",
    ),
    (
        "--rollout.routing=sampled --rollout.transformers={} --rollout.vllm=null",
        "rollout.routing: sampled",
        "--rollout.routing=live",
    ),
    (
        "--rollout.routing=sampled --rollout.vllm.pipeline_parallel=2",
        "rollout.vllm.pipeline_parallel",
        "--rollout.vllm.pipeline_parallel=1",
    ),
    (
        "--rollout.routing=sampled --rollout.vllm.arguments={enable_prefix_caching: false}",
        "enable_prefix_caching",
        "--rollout.vllm.arguments={}",
    ),
    (
        "--rollout.staleness=1 --algorithm.advantage.name=remax",
        "algorithm.advantage: remax",
        "--algorithm.advantage.name=rloo",
    ),
    (
        "--rollout.staleness=1 --batch.dynamic_sampling={oversampling: 2}",
        "batch.dynamic_sampling.oversampling: 2.0",
        "--batch.dynamic_sampling={}",
    ),
]


@pytest.mark.parametrize(("flags", "message", "mended"), CASES, ids=[case[0] for case in CASES])
def test_parts_that_cannot_go_together_are_refused(flags: str, message: str, mended: str) -> None:
    given = [f"--{flag}" for flag in flags.removeprefix("--").split(" --")]
    with pytest.raises(PlimsollError) as caught:
        load_spec(JOBS["grpo"], "c.yaml", given)
    assert message in str(caught.value)
    name = mended.partition("=")[0]
    kept = [flag for flag in given if flag.partition("=")[0] != name]
    load_spec(JOBS["grpo"], "c.yaml", [*kept, mended])
