"""Moments taken out of one AdamW and put into another: the second goes on as the first would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plimsoll.trainer.zero.optimizer import begin_moments, moment_rows


def adamw(weights: Sequence[Tensor]) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    return parameters, torch.optim.AdamW(parameters, lr=0.1, fused=True)


def step(parameters: Sequence[nn.Parameter], optimizer: torch.optim.AdamW, seed: int) -> None:
    """The last parameter never gets a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_another_optimizer_goes_on() -> None:
    first, straight = adamw([torch.ones(2, 3), torch.ones(4), torch.ones(5)])
    for seed in (1, 2):
        step(first, straight, seed)
    rows = moment_rows(straight, first)
    assert [len(row) for row in rows["exp_avg"]] == [6, 4, 5]
    assert not rows["exp_avg_sq"][2].any()

    second, resumed = adamw([parameter.detach() for parameter in first])
    for name, found in begin_moments(resumed, second, updates=2).items():
        for row, kept in zip(found, rows[name], strict=True):
            row.copy_(kept)
    for parameters, optimizer in ((first, straight), (second, resumed)):
        step(parameters, optimizer, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_before_the_first_update_there_are_none() -> None:
    parameters, optimizer = adamw([torch.ones(2), torch.ones(1)])
    assert moment_rows(optimizer, parameters) == {}
    step(parameters, optimizer, seed=1)
    assert begin_moments(optimizer, parameters, updates=0) == {}
    assert not optimizer.state[parameters[0]]
