"""SmolLM2 learns from rewards: samples, updates and synced weights against plain transformers, with
both engines; in float32, so only the order of sums differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from choice import slow
from commands import VLLM, column
from real_cases import base_config, continuation_logprobs, load_policy, train, write_questions
from safetensors.torch import load_file

from plimsoll.records import Trajectory
from plimsoll.run.trajectories import read_trajectories

pytestmark = pytest.mark.real

STEPS = 2
ROUNDING = 1e-4
"""Nats: what two orders of the same float32 sums differ by."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with rows; it is removed afterwards, as runs of a real model are large."""
    home = tmp_path_factory.mktemp("real-rl")
    write_questions(home)
    (home / "rewards.py").write_text(
        "def characters(trajectory):\n    return float(len(trajectory.response_text))\n"
    )
    yield home
    shutil.rmtree(home)


def rl_config(directory: str, smollm2: Path, responses: int) -> dict[str, Any]:
    """Return a run whose reward, the length of the text, differs from response to response."""
    batch = {"prompts": 2, "responses": responses}
    config = base_config(directory, smollm2, {"prompt": "question"}, batch)
    config["run"] |= {"steps": STEPS, "eval_every": None}
    del config["data"]["eval"]
    config["rewards"] = {"characters": {"name": "rewards.py:characters", "weight": 0.1}}
    config["rollout"] = {"dtype": "float32", "sampling": {"max_new_tokens": 8}}
    return config


def sampled(directory: Path, step: int) -> list[Trajectory]:
    return read_trajectories(directory / "trajectories" / f"step-{step:06d}.parquet")


def plain_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    prompt = trajectory.prompt.tokens.tolist()
    tokens = [*prompt, *trajectory.response_tokens.tolist()]
    return continuation_logprobs(model, tokens, len(prompt))


@pytest.mark.slow
def test_grpo_learns_as_plain_transformers_does(home: Path, smollm2: Path) -> None:
    config = rl_config("grpo", smollm2, 4)
    config["rollout"] |= {"transformers": {}}
    rows = train(home, "grpo", config)
    model = load_policy(smollm2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, (0.9, 0.95), weight_decay=0.0)
    for step, row in enumerate(rows, start=1):
        trajectories = sampled(home / "grpo", step)
        rewards_PR = torch.tensor([t.reward for t in trajectories]).view(2, 4)
        spread_P1 = rewards_PR.std(dim=1, keepdim=True)
        advantages_S = ((rewards_PR - rewards_PR.mean(1, keepdim=True)) / (spread_P1 + 1e-6)).view(
            -1
        )
        assert row["reward"] == pytest.approx(rewards_PR.mean().item())
        tokens = sum(len(t.response_tokens) for t in trajectories)
        optimizer.zero_grad()
        for trajectory, advantage in zip(trajectories, advantages_S, strict=True):
            logprobs_T = plain_logprobs(model, trajectory)
            gap = (logprobs_T - torch.from_numpy(trajectory.sampler_logprobs)).abs().max()
            assert gap.item() < ROUNDING  # sampled by the weights that the step before left
            ratio_T = (logprobs_T - logprobs_T.detach()).exp()
            (-(ratio_T * advantage).sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert norm > 0 and row["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert row["sync/logprob_gap"] < ROUNDING and row["mismatch/abs"] < ROUNDING
    saved = load_file(home / "grpo" / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        # Adam moves a weight whose gradient is next to nothing by its sign.
        assert (saved[name] - parameter.detach()).abs().mean() < 1e-7, name


@pytest.mark.engine
@pytest.mark.parametrize(("quantization", "way"), [slow("none", "separate"), slow("nf4", "merged")])
def test_ppo_on_ray_samples_with_the_weights_that_it_learned(
    home: Path, smollm2: Path, quantization: str, way: str, shared_ray: tuple[str, ...]
) -> None:
    config = rl_config(f"ppo-{way}", smollm2, 2)
    del config["cluster"]
    config["rollout"] |= {"vllm": VLLM["vllm"] | {"adapter": way}}
    config["actor"]["model"]["quantization"] = quantization
    config["actor"] |= {"adapter": {"rank": 4, "alpha": 8.0}, "optimizer": {"learning_rate": 1e-3}}
    config["critic"] = config["actor"]
    rows = train(home, "ppo", config, *shared_ray)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sync/logprob_gap"] < ROUNDING and row["mismatch/abs"] < ROUNDING
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    assert abs(column(rows, "kl")[0]) < ROUNDING  # the reference is the actor without its adapter
    if quantization == "none":
        base = load_policy(smollm2)
        first, second = (distance(base, home / f"ppo-{way}", step) for step in (1, 2))
        assert first < ROUNDING and second > 10 * ROUNDING


def distance(base: Any, directory: Path, step: int) -> float:
    """Return the largest gap between the base's log-probs and the sampler's in a step, in nats."""
    with torch.no_grad():
        gaps = [
            plain_logprobs(base, trajectory) - torch.from_numpy(trajectory.sampler_logprobs)
            for trajectory in sampled(directory, step)
        ]
    return torch.cat(gaps).abs().max().item()
