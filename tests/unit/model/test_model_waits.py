"""The host never waits for a card while it gives it a micro-batch's forward and backward pass.

To read a number of a card, or to size a tensor by what a card computed, the host waits until the
card has done all that it was given. On a CPU the same operations show where that would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from packed_cases import CPU, LENGTHS, SMALL, loss_of, packed, samples_of, settings_for, write
from test_model_families import FAMILIES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from plimsoll.algorithm.choice import feedback_loss
from plimsoll.algorithm.inputs import FeedbackLossInputs, LabelCounts
from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.config.base import Choice
from plimsoll.data.packing import pack_one
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import Family, tiny_config
from plimsoll.records import COLUMNS, BatchCounts, Pack, PackColumns
from plimsoll.trainer.objectives import NllObjective, PolicyObjective, Shares, _add_shares, losses
from plimsoll.trainer.protocol import Engine

_aten = torch.ops.aten
READ_BY_THE_HOST = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
"""What reads a tensor's values to go on, or to know its result's size."""

KINDS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "full": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "offloaded": {"gradient_checkpointing": True, "activation_offload": "cpu"},
    "tiled": {"gradient_checkpointing": True, "activation_offload": "cpu", "mlp_tile": 5},
}
WINDOWS: list[tuple[Family, int | None]] = [
    *(("llama", None), ("qwen2", None), ("qwen2", 4), ("qwen3", None)),
    *(("mistral", 4), ("gemma", None), ("gemma2", 4), ("gemma3", 4)),
]


class Reads(TorchDispatchMode):
    """Notes what a card would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        picked = func in (_aten.index.Tensor, _aten.index_put_.default) and any(
            isinstance(by, Tensor) and by.dtype == torch.bool for by in args[1]
        )
        if (func in READ_BY_THE_HOST and "output_size" not in (kwargs or {})) or picked:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


def written(directory: Path, family: Family, window: int | None) -> Path:
    return write(directory, tiny_config(family, True, **SMALL, window=window))


def learn(model: PolicyModel, pack: PackTensors) -> None:
    found = model(pack, entropy="loss")
    loss_of(found.logprobs_L, found.entropy_L).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "window"), WINDOWS)
def test_no_number_is_read_in_a_forward_and_backward_pass(
    family: Family, window: int | None, kind: str, tmp_path: Path
) -> None:
    path = written(tmp_path, family, window)
    model = load_policy(settings_for(path, **KINDS[kind]), CPU)
    pack = packed(samples_of(LENGTHS))
    with Reads() as reads:
        learn(model, pack)
    assert not reads.found


def test_a_read_would_be_seen() -> None:
    numbers = torch.arange(4.0)
    with Reads() as reads:
        if (numbers == 0).all():
            raise AssertionError
        numbers[numbers > 1]
    assert reads.found == ["aten._local_scalar_dense.default", "aten.index.Tensor"]


def test_no_number_is_read_in_a_loss_on_binary_feedback() -> None:
    logratios_S = torch.tensor([3.0, 1.0, -3.0], requires_grad=True)
    labels_S = torch.tensor([True, True, False])
    inputs = FeedbackLossInputs(logratios_S, labels_S, 1.0, LabelCounts(2, 1))
    with Reads() as reads:
        output = feedback_loss(Choice(name="kto", options={"beta": 0.5}))(inputs)
        output.loss.backward()
    assert output.metrics and not reads.found


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_looks_for_no_sequences_in_positions(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts read numbers of their own; the search for packed sequences is not among them."""
    looked: list[str] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: looked.append("x"))
    model = load_policy(settings_for(write(tmp_path, FAMILIES[family]())), CPU)
    model(packed(samples_of(LENGTHS)), entropy="loss").logprobs_L.sum().backward()
    assert not looked


class Plain:
    """A model without an engine around it: what DeepSpeed adds has its own waits."""

    def __init__(self, model: PolicyModel) -> None:
        self.forward = model

    def learn(
        self, packs: list[Pack], objective: Any, columns: list[PackColumns], device: Any
    ) -> Shares:
        """Go through a step's micro-batches as `learn` does, up to the reading of their sums."""
        shares: Shares = {}
        counts = BatchCounts(tokens=40, sequences=8)
        for output in losses(cast(Engine, self), packs, columns, counts, objective, device):
            output.loss.backward()
            _add_shares(shares, output)
        return shares


def micro_batches() -> list[Pack]:
    """Packs of different lengths, as they come."""
    return [pack_one(samples_of(lengths), range(len(lengths))) for lengths in PACKS]


def policy_columns(pack: Pack) -> PackColumns:
    numbers_L = np.linspace(-1.0, 1.0, len(pack.targets_L), dtype=np.float32)
    return {column: numbers_L for column in COLUMNS.values() if column.in_policy_loss}


OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "nll": (NllObjective(), lambda pack: {}),
    "policy": (
        PolicyObjective(
            Choice(name="clip"),
            Choice(name="truncate"),
            PolicyTerms(kl_estimator="k3", kl_coefficient=0.1, entropy_bonus=0.05),
        ),
        policy_columns,
    ),
}
PACKS = ((7, 1, 12), (5,), (9, 3, 2, 6))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_number_is_read_between_the_micro_batches_of_a_step(name: str, tmp_path: Path) -> None:
    objective, columns_of = OBJECTIVES[name]
    engine = Plain(load_policy(settings_for(written(tmp_path, "qwen2", None)), CPU))
    packs = micro_batches()
    with Reads() as reads:
        shares = engine.learn(packs, objective, [columns_of(pack) for pack in packs], CPU)
    assert not reads.found and len(shares["loss"]) == len(packs)


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Have CUDA raise where the host would wait for the card inside the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "window", "dtype", "attention"),
    [
        ("qwen2", None, "bfloat16", "varlen"),
        ("mistral", 4, "bfloat16", "varlen"),
        ("qwen2", None, "bfloat16", "sdpa"),
        ("qwen2", None, "float32", "sdpa"),
        ("mistral", 4, "float32", "sdpa"),
        ("gemma2", 4, "float32", "sdpa"),
    ],
)
def test_the_host_does_not_wait_in_a_forward_and_backward_pass(
    family: Family, window: int | None, dtype: str, attention: str, kind: str, tmp_path: Path
) -> None:
    card = torch.device("cuda")
    settings = {"dtype": dtype, "attention": attention, **KINDS[kind]}
    path = written(tmp_path, family, window)
    model = load_policy(settings_for(path, **settings), card).to(card)
    pack = pack_one(samples_of(LENGTHS), range(len(LENGTHS)))
    learn(model, PackTensors.from_pack(pack, card))  # libraries start
    with refusing_waits():
        learn(model, PackTensors.from_pack(pack, card))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_host_does_not_wait_between_the_micro_batches_of_a_step(
    name: str, tmp_path: Path
) -> None:
    """Uploads of packs and columns, forward and backward passes, losses and their sums."""
    card, (objective, columns_of) = torch.device("cuda"), OBJECTIVES[name]
    settings = settings_for(written(tmp_path, "qwen2", None), dtype="bfloat16", attention="varlen")
    engine = Plain(load_policy(settings, card).to(card))
    packs = micro_batches()
    columns = [columns_of(pack) for pack in packs]
    engine.learn(packs, objective, columns, card)  # libraries start
    with refusing_waits():
        shares = engine.learn(packs, objective, columns, card)
    assert len(shares["loss"]) == len(packs)
