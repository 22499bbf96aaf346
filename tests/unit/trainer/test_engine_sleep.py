"""Storages that are emptied and filled again: what points into them, and what stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from plimsoll.trainer.zero.sleep import HostCopies, held_tensors, states_of, weights_of

HERE = torch.device("cpu")


def test_views_are_views_again_with_the_same_bytes() -> None:
    flat = torch.arange(12.0)
    weight, turned = nn.Parameter(flat[2:8].view(2, 3)), flat.view(3, 4).T
    expected = flat.clone()
    copies = HostCopies(HERE)
    copies.put([weight, flat])
    assert copies and flat.untyped_storage().nbytes() == 0
    assert torch.equal(copies.readable(weight), expected[2:8].view(2, 3))
    assert torch.equal(copies.readable(turned), expected.view(3, 4).T)
    copies.put([weight])  # is asleep already
    copies.take_back()
    assert not copies and torch.equal(flat, expected)
    flat[2] = 100.0
    assert weight[0, 0] == 100.0 and copies.readable(flat) is flat


def test_host_copies_are_on_the_host_under_any_default_device() -> None:
    weight, copies = torch.arange(3.0), HostCopies(HERE)
    with torch.device("meta"):
        copies.put([weight])
        assert copies.readable(weight).tolist() == [0.0, 1.0, 2.0]
        copies.take_back()
    assert weight.tolist() == [0.0, 1.0, 2.0]


def test_what_nobody_reads_is_emptied_and_not_copied() -> None:
    used, bucket = torch.arange(3.0), torch.ones(1000)
    copies = HostCopies(HERE)
    copies.put([used, bucket], unused=[bucket])
    assert bucket.untyped_storage().nbytes() == used.untyped_storage().nbytes() == 0
    assert sum(m.block.nbytes for m in copies._moved.values() if m.block is not None) == 12
    copies.take_back()
    assert bucket.untyped_storage().nbytes() == 4000 and used.tolist() == [0.0, 1.0, 2.0]


def test_a_hook_and_a_gradient_outlive_a_sleep() -> None:
    weight, seen = nn.Parameter(torch.ones(4)), list[Tensor]()
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    weight.sum().backward()
    copies = HostCopies(HERE)
    copies.put(held_tensors(weight))
    assert weight.grad is not None and weight.grad.untyped_storage().nbytes() == 0
    copies.take_back()
    (3 * weight).sum().backward()
    assert seen == [weight, weight] and torch.equal(weight.grad, torch.full((4,), 4.0))


def test_other_devices_and_mapped_files_stay(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8)}, tmp_path / "w.safetensors")
    mapped = load_file(tmp_path / "w.safetensors")["w"]
    elsewhere = torch.empty(8, device="meta")
    copies = HostCopies(HERE)
    copies.put([mapped, elsewhere])
    assert not copies and mapped.sum() == 8
    assert not HostCopies(torch.device("cuda", 0))  # and is made where there is no card


def test_the_search_reaches_tensors_at_any_depth_and_ends() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    found = [tensor.shape for tensor in held_tensors({"a": (optimizer,), "b": [optimizer]})]
    assert sorted(map(len, found)) == [0, 1, 1, 1, 1]  # step, weight, gradient and both moments


@pytest.mark.parametrize("holder", [nn.Linear(2, 2), SimpleNamespace(kept=torch.ones(2))])
def test_modules_and_other_libraries_are_not_searched(holder: object) -> None:
    assert [*held_tensors([holder])] == []


def test_states_are_all_that_an_optimizer_holds_but_weights() -> None:
    module = nn.Linear(3, 1)
    module.register_buffer("table", torch.ones(5))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    weights = {tensor.untyped_storage()._cdata for tensor in weights_of(module)}
    states = {tensor.untyped_storage()._cdata for tensor in states_of(module, optimizer)}
    assert len(weights) == 3 and weights.isdisjoint(states)
    assert len(states) == 2 * 4  # step, gradient and moments
