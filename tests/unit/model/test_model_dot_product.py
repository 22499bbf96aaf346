"""Attention of one sequence whose heads share keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plimsoll.model.attention import dot_product, repeat_heads

torch.set_num_threads(1)


def sequence(heads: int, groups: int, tokens: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Queries, keys and values, heads 16 wide, fp32."""
    torch.manual_seed(0)
    sizes = (heads, groups, groups)
    return tuple(
        torch.randn(1, size, tokens, 16, device=device, requires_grad=True) for size in sizes
    )


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by its definition: query head h reads key head h // (heads / groups)."""
    of_head = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    scores = query @ key[:, of_head].mT / query.shape[-1] ** 0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    output: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, of_head]
    return output


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_repeated_keys_change_nothing(groups: int, masked: bool) -> None:
    """Cards without the flash kernel compute so; here it is run on the CPU, with gradients."""
    query, key, value = sequence(6, groups, 9)
    mask = torch.full((9, 9), -torch.inf).triu(1) if masked else None
    want = attended(query, key, value)
    plain = dot_product(query, key, value, mask, None)
    again = dot_product(query, repeat_heads(key, 6), repeat_heads(value, 6), mask, None)
    wanted = torch.autograd.grad(want.square().sum(), (query, key, value))
    for found in (plain, again):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(found.square().sum(), (query, key, value))
        torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
def test_a_card_writes_no_scores_of_grouped_heads_in_fp32() -> None:
    query, key, value = sequence(8, 2, 4096, "cuda")
    scores = 4 * 8 * 4096**2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        dot_product(query, key, value, None, None).sum().backward()
    except NotImplementedError as error:
        # A summary cuts lines off: begin with what tells the operators from one another.
        message = str(error).removeprefix("Could not run 'aten::_scaled_dot_product_")
        pytest.fail(f"{message} (torch {torch.__version__}, {torch.cuda.get_device_name()})", False)
    assert torch.cuda.max_memory_allocated() - before < scores / 4
    grouped = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = dot_product(query, key, value, None, None)
    torch.testing.assert_close(found, grouped, rtol=1e-4, atol=1e-4)
