"""token_logprobs and token_nll against the plain full-logits computation, by hand, in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from plimsoll.model.logit_chunks import BLOCK_ELEMENTS_CPU, LogitForm
from plimsoll.model.token_logprobs import Entropy, TokenLogprobs, token_logprobs, token_nll

torch.set_num_threads(1)
PLAIN = LogitForm()


@dataclass(frozen=True)
class Head:
    """Leaves that gradients flow to, and the targets."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]


def make_head(
    rows: int, width: int, vocab: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Head:
    generator = torch.Generator().manual_seed(rows * 1000 + width * 10 + vocab)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return Head(leaf(rows, width), leaf(vocab, width), leaf(vocab) if bias else None, targets)


def full(head: Head, form: LogitForm = PLAIN) -> TokenLogprobs:
    """The definition, with all logits."""
    logits = torch.nn.functional.linear(head.hidden, head.weight, head.bias).float()
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    logp = torch.log_softmax(logits * form.scale, dim=1)
    picked = logp.gather(1, head.targets[:, None])[:, 0]
    return TokenLogprobs(picked, -(logp.exp() * logp).sum(1))


def chunked(
    head: Head, chunk: int, entropy: Entropy = "loss", form: LogitForm = PLAIN
) -> TokenLogprobs:
    return token_logprobs(
        head.hidden,
        head.weight,
        head.targets,
        bias_V=head.bias,
        chunk=chunk,
        form=form,
        entropy=entropy,
    )


def nll(head: Head, chunk: int, tokens: int, form: LogitForm = PLAIN) -> Tensor:
    inputs = (head.hidden, head.weight, head.targets, tokens)
    return token_nll(*inputs, bias_V=head.bias, chunk=chunk, form=form)


def weighted(result: TokenLogprobs) -> Tensor:
    """A loss that weighs every row differently, log-probabilities and entropies."""
    weights = torch.arange(1.0, len(result.logprobs_L) + 1).cos()
    loss = (result.logprobs_L * weights).sum()
    return loss if result.entropy_L is None else loss + (result.entropy_L * weights.flip(0)).sum()


def gradients(loss: Tensor, head: Head) -> list[Tensor]:
    return list(torch.autograd.grad(loss, head.leaves()))


def test_hand_computed_logprob_and_entropy() -> None:
    # logits ln 2, 0, 0: probabilities 1/2, 1/4, 1/4; entropy 1.5 ln 2.
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    weight = torch.tensor([[math.log(2), 0.0], [0.0, 1.0], [0.0, -1.0]])
    targets = torch.tensor([0, 2])
    result = token_logprobs(hidden, weight, targets, chunk=1, form=PLAIN, entropy="loss")
    assert result.entropy_L is not None
    assert result.logprobs_L.tolist() == pytest.approx([-math.log(2), -math.log(4)])
    assert result.entropy_L.tolist() == pytest.approx([1.5 * math.log(2)] * 2)


def test_temperature_two_halves_the_logits_by_hand() -> None:
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[2 * math.log(3)], [0.0]])
    result = token_logprobs(hidden, weight, torch.tensor([0]), chunk=4, form=LogitForm(0.5))
    assert result.logprobs_L.item() == pytest.approx(math.log(3 / 4))
    assert result.entropy_L is None


@settings(max_examples=percent(60))
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 6),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 11),
    scale=st.sampled_from([1.0, 0.5, 1.7]),
    softcap=st.sampled_from([None, 1.5, 30.0]),
    bias=st.booleans(),
    entropy=st.booleans(),
)
def test_equals_the_full_computation(
    rows: int,
    width: int,
    vocab: int,
    chunk: int,
    scale: float,
    softcap: float | None,
    bias: bool,
    entropy: bool,
) -> None:
    head = make_head(rows, width, vocab, bias)
    form = LogitForm(scale, softcap)
    ours, plain = chunked(head, chunk, "loss" if entropy else "none", form), full(head, form)
    expected = plain if entropy else TokenLogprobs(plain.logprobs_L, None)
    torch.testing.assert_close(ours.logprobs_L, plain.logprobs_L, rtol=1e-5, atol=1e-5)
    if entropy:
        torch.testing.assert_close(ours.entropy_L, plain.entropy_L, rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(weighted(ours), head), gradients(weighted(expected), head), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    mean, expected_mean = nll(head, chunk, 10, form), -full(head, form).logprobs_L.sum() / 10
    torch.testing.assert_close(mean, expected_mean, rtol=1e-5, atol=1e-5)
    # twice the loss, because backward passes scale
    pairs = zip(gradients(2 * mean, head), gradients(2 * expected_mean, head), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_nll_and_its_gradient_by_hand() -> None:
    # probabilities 1/2, 1/4, 1/4 of logits ln 2, 0, 0; one of two learned tokens is here
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[math.log(2), 0.0], [0.0, 1.0], [0.0, -1.0]], requires_grad=True)
    mean = token_nll(hidden, weight, torch.tensor([1]), 2, chunk=1, form=PLAIN)
    mean.backward()
    assert mean.item() == pytest.approx(math.log(4) / 2)
    assert hidden.grad is not None and weight.grad is not None
    # half of p - [target], times weight; and times hidden
    assert hidden.grad[0].tolist() == pytest.approx([math.log(2) / 4, -3 / 8 - 1 / 8])
    assert weight.grad[:, 0].tolist() == pytest.approx([1 / 4, -3 / 8, 1 / 8])
    assert not weight.grad[:, 1].any()


def test_nll_without_gradients_makes_none() -> None:
    head = make_head(rows=5, width=4, vocab=11)
    with torch.no_grad():
        mean = nll(head, 2, 5)
    assert not mean.requires_grad
    assert mean.item() == nll(head, 2, 5).item()


def test_nll_of_a_frozen_head_gives_hidden_states_their_gradient() -> None:
    head = make_head(rows=3, width=4, vocab=7)
    (expected, _) = gradients(nll(head, 2, 3), head)
    head.weight.requires_grad_(False)
    nll(head, 2, 3).backward()
    assert head.weight.grad is None and head.hidden.grad is not None
    assert torch.equal(head.hidden.grad, expected)


def test_rows_of_a_large_vocabulary_go_one_at_a_time() -> None:
    head = make_head(rows=5, width=4, vocab=BLOCK_ELEMENTS_CPU // 2 + 1)
    ours, plain = chunked(head, chunk=3), full(head)
    torch.testing.assert_close(ours.logprobs_L, plain.logprobs_L, rtol=1e-5, atol=1e-5)
    for got, want in zip(
        gradients(weighted(ours), head), gradients(weighted(plain), head), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", ["logprobs_L", "entropy_L"])
def test_gradients_flow_from_each_output_alone(chosen: str) -> None:
    head = make_head(rows=6, width=4, vocab=11)
    ours = getattr(chunked(head, chunk=4), chosen).sum()
    plain = getattr(full(head), chosen).sum()
    for got, want in zip(gradients(ours, head), gradients(plain, head), strict=True):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_no_rows_give_zero_gradients_not_none() -> None:
    head = make_head(rows=0, width=4, vocab=7, bias=True)
    result = chunked(head, chunk=3)
    weighted(result).backward()
    assert result.logprobs_L.shape == (0,)
    for leaf in head.leaves():
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()
    assert nll(head, 3, 5).item() == 0
    assert not any(g.any() for g in gradients(nll(head, 3, 5), head))


def test_bfloat16_computes_the_softmax_in_fp32() -> None:
    head = make_head(rows=16, width=8, vocab=64, dtype=torch.bfloat16)
    ours, plain = chunked(head, chunk=5), full(head)
    assert ours.logprobs_L.dtype == torch.float32
    # The same bf16 product, then fp32: only the last bits of the fp32 part may differ.
    torch.testing.assert_close(ours.logprobs_L, plain.logprobs_L, rtol=1e-5, atol=1e-5)
    for got, want in zip(
        gradients(weighted(ours), head), gradients(weighted(plain), head), strict=True
    ):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.06)


def test_nll_in_bfloat16_is_what_the_log_probs_give_to_the_bit() -> None:
    head = make_head(rows=16, width=8, vocab=64, dtype=torch.bfloat16)
    mean = -chunked(head, 5).logprobs_L.sum() / 16
    assert nll(head, 5, 16).item() == mean.item()
    pairs = zip(gradients(nll(head, 5, 16), head), gradients(mean, head), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)


@settings(max_examples=percent(40))
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 11),
    softcap=st.sampled_from([None, 1.5]),
    bias=st.booleans(),
    entropy=st.sampled_from(["none", "metric", "loss"]),
)
def test_a_frozen_head_gives_only_hidden_states_a_gradient(
    rows: int, chunk: int, softcap: float | None, bias: bool, entropy: Entropy
) -> None:
    head, form = make_head(rows, 4, 7, bias), LogitForm(0.7, softcap)
    for leaf in head.leaves()[1:]:
        leaf.requires_grad_(False)
    ours, plain = chunked(head, chunk, entropy, form), full(head, form)
    torch.testing.assert_close(ours.logprobs_L, plain.logprobs_L, rtol=1e-5, atol=1e-5)
    if entropy == "none":
        assert ours.entropy_L is None
    else:
        torch.testing.assert_close(ours.entropy_L, plain.entropy_L, rtol=1e-5, atol=1e-5)
        assert ours.entropy_L is not None and ours.entropy_L.requires_grad == (entropy == "loss")
    if entropy != "loss":
        ours, plain = ours._replace(entropy_L=None), plain._replace(entropy_L=None)
    expected = torch.autograd.grad(weighted(plain), head.hidden)[0]
    weighted(ours).backward()
    assert head.hidden.grad is not None
    torch.testing.assert_close(head.hidden.grad, expected, rtol=1e-5, atol=1e-5)
    assert all(leaf.grad is None for leaf in head.leaves()[1:])


@pytest.mark.parametrize("frozen", [False, True])
def test_an_entropy_that_is_a_metric_has_no_gradient(frozen: bool) -> None:
    head = make_head(rows=3, width=4, vocab=7)
    head.weight.requires_grad_(not frozen)
    found = chunked(head, 2, "metric")
    assert found.logprobs_L.requires_grad
    assert found.entropy_L is not None and not found.entropy_L.requires_grad


def peak_bytes(head: Head, compute: Callable[[], Tensor]) -> int:
    """Most bytes alive at once in forward and backward, beyond the head's own tensors."""
    tracker = LiveBytes()
    with tracker:
        gradients(compute(), head)
    return tracker.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_holds_no_more_than_one_chunk_of_logits(dtype: torch.dtype) -> None:
    rows, width, vocab, chunk = 2048, 16, 8192, 512
    head = make_head(rows, width, vocab, dtype=dtype)
    one_chunk = chunk * vocab * dtype.itemsize
    own_gradients = (head.hidden.numel() + head.weight.numel()) * dtype.itemsize
    # A few cache-sized blocks of softmax, and a few numbers a row.
    scratch = 6 * BLOCK_ELEMENTS_CPU * 4 + 16 * rows * 4
    bound = one_chunk + own_gradients + scratch
    assert bound < 1.8 * one_chunk + own_gradients  # so two chunks would not pass
    for ours in (lambda: weighted(chunked(head, chunk)), lambda: nll(head, chunk, rows)):
        assert one_chunk <= peak_bytes(head, ours) <= bound
    assert peak_bytes(head, lambda: weighted(full(head))) > rows * vocab * 4 > bound
    few = make_head(chunk // 2, width, vocab, dtype=dtype)
    assert peak_bytes(few, lambda: weighted(chunked(few, chunk))) <= bound - one_chunk // 2
