"""All figures of a PPO run computed once more, from its trajectories and the model that it began
with, in plain PyTorch and transformers: sequence by sequence, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from commands import PPO, metrics, run_here, write_config, write_task
from engine_cases import SEED
from engine_reference import plain_critic, plain_logprobs, plain_policy, plain_values
from safetensors.torch import load_file
from torch import Tensor

from plimsoll.commands.demo import make_tokenizer
from plimsoll.records import Sample

STEPS, EPOCHS, MINI_BATCHES, TEMPERATURE = 3, 2, 3, 0.7
UPDATES = EPOCHS * MINI_BATCHES
KL, TARGET, HORIZON, BONUS = 0.2, 0.5, 50, 0.03
LOW, HIGH, DUAL, VALUE_CLIP, GAMMA, LAMBDA = 0.1, 0.15, 1.3, 0.05, 0.97, 0.9
NORM, DECAY, PEAK = 0.3, 0.1, {"actor": 0.02, "critic": 0.01}

OPTIMIZER = {"max_grad_norm": NORM, "weight_decay": DECAY, "final_ratio": 0.1, "warmup_steps": 3}
EXACT = {"path": "model", "dtype": "float32"}
CONFIG: dict[str, Any] = PPO | {
    "run": {"directory": "numbers", "steps": STEPS, "seed": SEED},
    **{
        role: {
            "model": EXACT,
            "zero": {"stage": stage},
            "optimizer": OPTIMIZER | {"learning_rate": PEAK[role], "schedule": "cosine"},
        }
        for role, stage in (("actor", 0), ("critic", 2))
    },
    "rollout": {
        "transformers": {},
        "dtype": "float32",
        "sampling": {"max_new_tokens": 8, "temperature": TEMPERATURE},
    },
    "algorithm": {
        "epochs": EPOCHS,
        "mini_batches": MINI_BATCHES,
        "kl": {"coefficient": KL, "adaptive": {"target": TARGET, "horizon": HORIZON}},
        "entropy_bonus": BONUS,
        "value_clip": VALUE_CLIP,
        "advantage": {"name": "gae", "options": {"gamma": GAMMA, "gae_lambda": LAMBDA}},
        "policy_loss": {
            "name": "clip",
            "options": {"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL},
        },
    },
}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Twin:
    """A model that learns as a role of the run does."""

    model: Any
    optimizer: torch.optim.Optimizer
    peak: float

    @classmethod
    def of(cls, model: Any, role: str) -> Twin:
        weights = list(model.parameters())
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
        ]
        return cls(model, torch.optim.AdamW(groups, betas=(0.9, 0.95)), PEAK[role])

    def learn(self, loss: Tensor, update: int) -> float:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * share_of_peak(update)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def share_of_peak(update: int) -> float:
    """Three updates up, then half a cosine down to a tenth at the last one."""
    if update < 3:
        return (update + 1) / 3
    along = (update - 3) / (STEPS * UPDATES - 1 - 3)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * along)) / 2


def gae(rewards: Tensor, values: Tensor) -> Tensor:
    advantages, after, value_after = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = float(rewards[t]) + GAMMA * value_after - float(values[t])
        after = delta + GAMMA * LAMBDA * after
        advantages[t], value_after = after, float(values[t])
    return advantages


@dataclass(frozen=True)
class Batch:
    """A step's trajectories; lists of tensors, a number for each response token."""

    samples: list[Sample]
    old: list[Tensor]
    reference: list[Tensor]
    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]


def read_batch(rows: Rows, actor: Any, critic: Any, reference: Any, kl: float) -> Batch:
    encode = make_tokenizer().encode
    samples = []
    for row in rows:
        tokens = np.array([*encode(row["prompt"]), *row["tokens"]])
        samples.append(Sample(tokens, np.arange(len(tokens)) >= len(tokens) - len(row["tokens"])))
    with torch.no_grad():
        old = [plain_logprobs(actor, s, TEMPERATURE)[0] for s in samples]
        against = [plain_logprobs(reference, s, TEMPERATURE)[0] for s in samples]
        values = [plain_values(critic, s) for s in samples]
    advantages = []
    for row, policy, ref, own in zip(rows, old, against, values, strict=True):
        rewards = -kl * (policy - ref)
        rewards[-1] += row["reward"]
        advantages.append(gae(rewards, own))
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    flat = torch.cat(advantages)
    white = [(a - flat.mean()) / flat.std(correction=0) for a in advantages]
    return Batch(samples, old, against, values, white, returns)


def actor_loss(model: Any, batch: Batch, members: Sequence[int]) -> dict[str, Tensor]:
    found = [plain_logprobs(model, batch.samples[i], TEMPERATURE) for i in members]
    new, entropy = (torch.cat(column) for column in zip(*found, strict=True))
    old, advantages = (torch.cat([x[i] for i in members]) for x in (batch.old, batch.advantages))
    ratio = (new - old).exp()
    terms, clipped = [], 0
    for r, a in zip(ratio, advantages, strict=True):
        bound = min(r.item(), 1 + HIGH) if a > 0 else min(max(r.item(), 1 - LOW), DUAL)
        clipped += bound != r.item()
        terms.append(r * a if bound == r.item() else bound * a)
    policy = -torch.stack(terms).mean()
    log_ratio = (new - old).detach()
    return {
        "actor/loss": policy - BONUS * entropy.mean(),
        "policy_loss": policy,
        "entropy": entropy.mean(),
        "ratio": ratio.mean(),
        "clip_fraction": torch.tensor(clipped / len(terms)),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).mean(),
    }


def critic_loss(model: Any, batch: Batch, members: Sequence[int]) -> dict[str, Tensor]:
    new = torch.cat([plain_values(model, batch.samples[i]) for i in members])
    old, returns = (torch.cat([x[i] for i in members]) for x in (batch.values, batch.returns))
    near = torch.minimum(torch.maximum(new, old - VALUE_CLIP), old + VALUE_CLIP)
    plain, held = (new - returns) ** 2, (near - returns) ** 2
    return {
        "value_loss": torch.maximum(plain, held).mean() / 2,
        "value_mean": new.mean(),
        "value_error": plain.mean(),
        "value_clip_fraction": (held > plain).float().mean(),
    }


Loss = Callable[[Any, Batch, Sequence[int]], dict[str, Tensor]]


def learn(twin: Twin, loss: Loss, batch: Batch, step: int, norm: str) -> dict[str, float]:
    """All updates of a step, on the trajectories that the run drew for each; the metrics' means."""
    drawn = np.random.default_rng([SEED, step, 0]).permutation(len(batch.samples))
    minis = np.split(drawn, MINI_BATCHES)
    order = np.random.default_rng([SEED, step, 1])
    seen: list[dict[str, float]] = []
    for mini in (i for _ in range(EPOCHS) for i in order.permutation(MINI_BATCHES)):
        found = loss(twin.model, batch, minis[mini].tolist())
        total = next(iter(found.values()))
        length = twin.learn(total, (step - 1) * UPDATES + len(seen))
        seen.append({name: x.item() for name, x in found.items()} | {norm: length})
    return {name: float(np.mean([one[name] for one in seen])) for name in seen[0]}


def batch_figures(rows: Rows, batch: Batch, kl: float) -> dict[str, float]:
    returns, values = torch.cat(batch.returns), torch.cat(batch.values)
    gaps = [float((p - r).sum()) for p, r in zip(batch.old, batch.reference, strict=True)]
    return {
        "reward": float(np.mean([row["reward"] for row in rows])),
        "response_tokens": float(np.mean([len(row["tokens"]) for row in rows])),
        "finished": float(np.mean([row["finish_reason"] == "stop" for row in rows])),
        "kl": float(np.mean(gaps)),
        "kl_coefficient": kl,
        "explained_variance": float(1 - (returns - values).var() / returns.var()),
    }


def test_every_figure_and_the_weights_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    write_task(tmp_path)
    write_config(tmp_path, "numbers", CONFIG)
    assert run_here(tmp_path, "ppo", "numbers.yaml").code == 0
    directory, start = tmp_path / "numbers", tmp_path / "model"
    actor, critic = Twin.of(plain_policy(start), "actor"), Twin.of(plain_critic(start), "critic")
    reference, kl = plain_policy(start), KL
    for reported in metrics(directory):
        step = int(reported["step"])
        rows = parquet.read_table(directory / f"trajectories/step-{step:06d}.parquet").to_pylist()
        batch = read_batch(rows, actor.model, critic.model, reference, kl)
        wanted = batch_figures(rows, batch, kl)
        wanted |= learn(critic, critic_loss, batch, step, "critic/grad_norm")
        wanted |= learn(actor, actor_loss, batch, step, "actor/grad_norm")
        wanted["learning_rate"] = PEAK["actor"] * share_of_peak(step * UPDATES - 1)
        for name, figure in wanted.items():
            # A token more or less at a clip's edge is a 70th of one of 6 updates.
            loose = 5e-3 if name.endswith("clip_fraction") else 2e-5
            assert reported[name] == pytest.approx(figure, rel=5e-4, abs=loose), (step, name)
        means = [float(a.mean()) for a in batch.advantages]
        assert [row["advantage_mean"] for row in rows] == pytest.approx(means, rel=1e-3, abs=1e-3)
        kl *= 1 + max(-0.2, min(0.2, wanted["kl"] / TARGET - 1)) * len(rows) / HORIZON
    loss_mask = load_file(directory / "model" / "model.safetensors")
    for name, weight in actor.model.named_parameters():
        if name in loss_mask and "k_proj.bias" not in name:  # which attention does not see
            torch.testing.assert_close(loss_mask[name], weight.data, rtol=0, atol=5e-4, msg=name)
