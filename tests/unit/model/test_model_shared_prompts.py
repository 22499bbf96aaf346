"""Sequences that share a prompt in a pack, against each alone through plain transformers.

Log-probabilities, entropies and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import (
    CPU,
    SMALL,
    VOCAB,
    alone,
    assert_same,
    packed,
    settings_for,
    together,
    write,
)
from torch import Tensor
from transformers import GPT2Config

from plimsoll.data.packing import pack_one, shared_tokens
from plimsoll.model.attention import VARLEN
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import Family, tiny_config
from plimsoll.records import Sample

Groups = Sequence[tuple[int, Sequence[int]]]
"""Tokens of a prompt, and of each response to it."""
GROUPS = ((9, (5, 7)), (12, (1, 3)), (1, (4, 4)), (0, (6, 2)), (3, (5, 1, 9, 2)))


def samples_in(groups: Groups, seed: int = 0) -> tuple[list[Sample], list[int]]:
    """Random prompts, and responses of which about two thirds are learned; what each shares."""
    rng = np.random.default_rng(seed)
    samples, shared = [], []
    for prompt, responses in groups:
        begin = rng.integers(0, VOCAB, prompt)
        group = []
        for response in responses:
            loss_mask = np.arange(prompt + response) >= max(1, prompt)
            loss_mask &= rng.random(prompt + response) < 0.66
            tokens = np.concatenate([begin, rng.integers(0, VOCAB, response)])
            group.append(Sample(tokens, loss_mask))
        samples += group
        shared += shared_tokens(group)
    return samples, shared


def test_every_prompt_is_shared() -> None:
    _, shared = samples_in(GROUPS)
    assert shared == [0, 9, 0, 12, 0, 1, 0, 0, 0, 3, 3, 3]


@pytest.mark.parametrize("family", get_args(Family))
def test_shared_prompts_equal_each_sequence_alone(family: Family, tmp_path: Path) -> None:
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL))
    samples, shared = samples_in(GROUPS)
    assert_same(together(path, samples, shared=shared), alone(path, samples))


@pytest.mark.parametrize("window", [1, 2, 4, 10])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3"])
def test_windows_that_end_in_prompts_and_in_responses(
    family: Family, window: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL, window=window))
    samples, shared = samples_in(GROUPS)
    assert_same(together(path, samples, shared=shared), alone(path, samples))


@pytest.mark.parametrize("kind", [True, "selective"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_gradient_checkpointing_changes_nothing(
    family: Family, kind: bool | str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL, window=4))
    samples, shared = samples_in(GROUPS)
    found = together(path, samples, shared=shared, gradient_checkpointing=kind)
    assert_same(found, alone(path, samples))


def test_responses_stand_after_the_prompt(tmp_path: Path) -> None:
    """GPT-2 learns a vector per position; rotary embeddings see only distances."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = write(tmp_path / "model", config)
    samples, shared = samples_in(GROUPS)
    assert_same(together(path, samples, shared=shared), alone(path, samples))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    path = write(tmp_path_factory.mktemp("shared") / "m", tiny_config("qwen3", True, **SMALL))
    return load_policy(settings_for(path), CPU)


RESPONSES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=percent(25))
@given(
    groups=st.lists(st.tuples(st.integers(0, 20), RESPONSES), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_any_lengths(model: PolicyModel, groups: Groups, seed: int) -> None:
    samples, shared = samples_in(groups, seed)
    with torch.no_grad():
        found = model(packed(samples, shared)).logprobs_L
        single = [model(packed([s])).logprobs_L for s in samples]
    torch.testing.assert_close(found, torch.cat(single), rtol=1e-5, atol=1e-5)


def test_a_response_does_not_see_the_other(model: PolicyModel) -> None:
    """Another first response changes nothing for the second."""
    (first, second), shared = samples_in([(6, (5, 5))])
    changed = np.where(np.arange(11) < 6, first.tokens, (first.tokens + 1) % VOCAB)
    with torch.no_grad():
        a, b = (
            model(packed([one, second], shared)).logprobs_L
            for one in (first, Sample(changed, first.loss_mask))
        )
    border = int(first.loss_mask.sum())
    assert torch.equal(a[border:], b[border:])
    assert (a[:border] - b[:border]).abs().max() > 1e-2


def varlen_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> Tensor:
    """Return what flash attention's documentation says of `flash_attn_varlen_func`, written out."""
    assert (int(cu_queries.diff().max()), int(cu_keys.diff().max())) == (most_queries, most_keys)
    left, right = window_size
    outputs = []
    for i in range(len(cu_queries) - 1):
        q = query[cu_queries[i] : cu_queries[i + 1]].transpose(0, 1)
        k, v = (x[cu_keys[i] : cu_keys[i + 1]].transpose(0, 1) for x in (key, value))
        if enable_gqa:
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        keys = torch.arange(k.shape[1])
        sees = (keys <= at + right) & ((keys >= at - left) if left >= 0 else True)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~sees, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 4])
def test_the_inputs_of_the_kernel_for_cards(window: int | None, tmp_path: Path) -> None:
    """The kernel is replaced by its definition on a CPU."""
    path = write(tmp_path / "model", tiny_config("mistral", True, **SMALL, window=window))
    samples, shared = samples_in(GROUPS)
    with (
        patch("plimsoll.model.attention.varlen_attn", varlen_by_definition),
        patch("plimsoll.model.load.attention_name", lambda *_: VARLEN),
        patch("plimsoll.model.cpu.OF_PACKS", 1),  # on cards packs are not filled
    ):
        assert_same(together(path, samples, shared=shared), alone(path, samples))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_sharing_changes_nothing_on_cuda(
    attention: str, window: int | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", tiny_config("mistral", True, **SMALL, window=window))
    device = torch.device("cuda")
    samples, shared = samples_in(GROUPS)
    results = []
    for shared_S in (None, np.array(shared)):
        policy = load_policy(settings_for(path, dtype="bfloat16", attention=attention), device)
        policy.to(device)
        pack = PackTensors.from_pack(pack_one(samples, range(len(samples)), shared_S), device)
        logprobs_L = policy(pack).logprobs_L
        logprobs_L.sum().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        results.append((logprobs_L, gradients))
    (whole, whole_gradients), (found, gradients) = results
    torch.testing.assert_close(found, whole, rtol=0.05, atol=0.1)
    for one, other in zip(gradients, whole_gradients, strict=True):
        # On a CPU bfloat16's own are up to 0.04 from those in float32.
        assert (one - other).norm() < 0.1 * other.norm()
