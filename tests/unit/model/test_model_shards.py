"""The parts of packs that ranks share: every row once, and attention as of the whole pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.config.cluster import DecidedExchange
from plimsoll.model.attention import Attended, Kernel, PackLayout, _varlen, sdpa
from plimsoll.model.cpu import OF_PACKS, _kernel
from plimsoll.model.shards import PackShare, Shard, share_pack

CPU = torch.device("cpu")
WIDTH = 8


@st.composite
def packs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Own tokens of each sequence, and how many it shares with the last one that shares none."""
    own, shared, leader = list[int](), list[int](), 0
    for _ in range(draw(st.integers(1, 5))):
        own.append(draw(st.integers(1, 150)))
        shared.append(draw(st.integers(0, leader - 1)) if leader > 1 else 0)
        leader = leader if shared[-1] else own[-1]
    return tuple(own), tuple(shared)


def layout_of(own: Sequence[int], shared: Sequence[int], device: torch.device) -> PackLayout:
    return PackLayout.of(np.cumsum([0, *own], dtype=np.int32), np.array(shared), device)


def shares_of(
    layout: PackLayout, shards: int, exchange: DecidedExchange, predictor_L: Sequence[int] = ()
) -> list[PackShare]:
    """Return what each rank computes."""
    predictors, device = np.array(predictor_L, np.int64), layout.cu_queries.device
    ranks = (Shard(index, shards, exchange) for index in range(shards))
    return [share_pack(layout, predictors, rank, device) for rank in ranks]


@given(packs(), st.integers(2, 5), st.sampled_from(["heads", "keys"]), st.data())
def test_every_row_and_every_learned_token_has_one_rank(
    pack: tuple[tuple[int, ...], tuple[int, ...]],
    shards: int,
    exchange: DecidedExchange,
    data: st.DataObject,
) -> None:
    tokens = sum(pack[0])
    predictor_L = data.draw(st.lists(st.integers(0, tokens - 1), max_size=40))
    shares = shares_of(layout_of(*pack, CPU), shards, exchange, predictor_L)
    rows = [row for share in shares for part in share.ranges for row in range(part.stop)[part]]
    assert sorted(rows) == list(range(shares[0].rows)) and shares[0].rows % (shards * OF_PACKS) == 0
    tokens_T = torch.arange(1, tokens + 1)
    taken = [share.take(tokens_T) for share in shares]
    assert sorted(torch.cat(taken).tolist())[shares[0].rows - tokens :] == tokens_T.tolist()
    most = shares[0].most
    read = [own[share.predictor_L] - 1 for own, share in zip(taken, shares, strict=True)]
    gathered = torch.cat([torch.nn.functional.pad(x, (0, most - len(x))) for x in read])
    for share in shares:  # as after the exchange: each learned token at its place
        assert gathered[share.place_L].tolist() == predictor_L
    owned = torch.cat([share.own_L for share in shares])
    assert sorted(owned.tolist()) == list(range(len(predictor_L)))


def attended(layout: PackLayout, dtype: torch.dtype, window: int | None) -> Attended:
    """Return random queries, keys and values of the filled pack, of 4 heads and 2 key heads."""
    device, generator = layout.cu_queries.device, torch.Generator().manual_seed(0)

    def rows(heads: int) -> Tensor:
        drawn = torch.randn(1, heads, sum(layout.own), WIDTH, generator=generator)
        return drawn.to(device, dtype)

    return Attended(rows(4), rows(2), rows(2), layout, None, window, None, None)


def check_keys(
    kernel: Kernel,
    pack: tuple[tuple[int, ...], tuple[int, ...]],
    shards: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Compare each rank's attention over gathered keys with the whole pack's."""
    shares = shares_of(layout_of(*pack, device), shards, "keys")
    fill = shares[0].rows - sum(pack[0])
    own, shared = (*pack[0], *([fill] if fill else [])), (*pack[1], *([0] if fill else []))
    whole = attended(layout_of(own, shared, device), dtype, window)
    wanted = kernel(whole)[0]
    ranges = [rows for share in shares for rows in share.ranges]  # rank after rank
    key, value = (
        torch.cat([x[:, :, rows] for rows in ranges], 2) for x in (whole.key, whole.value)
    )
    for share in shares:
        query = torch.cat([whole.query[0, :, rows] for rows in share.ranges], 1)[None]
        layout = replace(share.layout, exchange=None)
        found = kernel(replace(whole, query=query, key=key, value=value, layout=layout))[0]
        expected = torch.cat([wanted[rows] for rows in share.ranges])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", [sdpa, _kernel], ids=["sdpa", "cpu"])
@given(packs(), st.integers(2, 4), st.sampled_from([None, 7, 60]))
def test_attention_over_gathered_keys_is_that_of_the_whole_pack(
    kernel: Kernel,
    pack: tuple[tuple[int, ...], tuple[int, ...]],
    shards: int,
    window: int | None,
) -> None:
    check_keys(kernel, pack, shards, window, torch.float32)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("window", [None, 60])
def test_flash_attention_over_gathered_keys_is_that_of_the_whole_pack(window: int | None) -> None:
    pack = (200, 90, 300, 80), (0, 50, 0, 120)
    check_keys(_varlen, pack, 4, window, torch.bfloat16, torch.device("cuda"))
