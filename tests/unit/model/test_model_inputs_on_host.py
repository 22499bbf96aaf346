"""Layer inputs that wait on the host: their places, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_cases import SMALL, samples_of, settings_for, write
from torch import Tensor

from plimsoll.data.packing import pack_one
from plimsoll.model.checkpointing import HostBlocks, InputsOnHost
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.tiny import tiny_config


@given(st.lists(st.lists(st.integers(0, 5000), max_size=6), max_size=6))
def test_there_are_as_many_blocks_as_were_in_use_at_once(rounds: list[list[int]]) -> None:
    """Each round is a forward pass that takes blocks and a backward pass that puts them back."""
    blocks = HostBlocks(pin=False)
    for sizes in rounds:
        taken = [blocks.take(size) for size in sizes]
        assert len({block.data_ptr() for block in taken}) == len(taken)
        for block, size in zip(taken, sizes, strict=True):
            assert block.nbytes >= size and block.nbytes.bit_count() == 1
        for block in reversed(taken):
            blocks.put_back(block)
    assert len(blocks._spare) == max((len(sizes) for sizes in rounds), default=0)


def test_a_block_is_used_again_and_a_larger_one_takes_its_place() -> None:
    blocks = HostBlocks(pin=False)
    first = blocks.take(1000)
    blocks.put_back(first)
    assert blocks.take(700).data_ptr() == first.data_ptr()
    blocks.put_back(first)
    assert blocks.take(1025).nbytes == 2048
    assert not blocks._spare


def test_a_block_is_on_the_host_under_any_default_device() -> None:
    with torch.device("meta"):
        assert HostBlocks(pin=False).take(8).device.type == "cpu"


def test_tensors_of_a_cpu_stay_where_they_are() -> None:
    inputs = torch.randn(3, requires_grad=True)
    with InputsOnHost().saving():
        output = inputs * inputs
    assert output.grad_fn is not None
    assert output.grad_fn._saved_self.data_ptr() == inputs.data_ptr()  # type: ignore[attr-defined]
    output.sum().backward()
    assert inputs.grad is not None and torch.equal(inputs.grad, 2 * inputs)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
def test_gradients_of_micro_batches_that_the_host_is_ahead_of(tmp_path: Path) -> None:
    """They are those of inputs that stay, and no block of host memory is added meanwhile."""
    card = torch.device("cuda")
    path = write(tmp_path, tiny_config("qwen2", True, **SMALL, layers=6))
    packs = [pack_one(samples_of((length, 90)), range(2)) for length in (700, 300, 700, 650)]

    def gradients(offload: str) -> tuple[list[Tensor], int]:
        changes = {"gradient_checkpointing": True, "activation_offload": offload}
        settings = settings_for(path, attention="sdpa", **changes)
        model = load_policy(settings, card).to(card)
        sent = [PackTensors.from_pack(pack, card) for pack in packs]
        made = []
        for pack in sent:
            torch.cuda._sleep(50_000_000)  # the card is behind
            model(pack).logprobs_L.sum().backward()
            made.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        return [p.grad for p in model.parameters() if p.grad is not None], made[-1] - made[0]

    wanted, _ = gradients("none")
    found, added = gradients("cpu")
    assert wanted
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert added == 0
