"""Arrays reach a device unchanged, in one copy, and the host does not wait for a card."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packed_cases import CPU
from test_model_shared_prompts import GROUPS, samples_in

import plimsoll
from plimsoll.data.packing import pack_one
from plimsoll.model import policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.sending import (
    ALIGNMENT,
    Arrays,
    buffer_size,
    keep_on_host,
    send,
    views,
)
from plimsoll.records import ADVANTAGES, Pack

SOURCES = sorted(Path(plimsoll.__file__).parent.rglob("*.py"))


def a_pack() -> Pack:
    samples, shared = samples_in(GROUPS)
    return pack_one(samples, range(len(samples)), np.array(shared))


def test_a_copy_is_sent() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    array.flags.writeable = False  # as Ray's store gives them
    copy = send({"array": array}, CPU)["array"]
    assert copy.dtype == torch.int32 and copy.tolist() == array.tolist()
    copy.zero_()
    assert array[1, 2] == 5


def test_absent_arrays_are_left_out() -> None:
    sent = send({"there": np.ones(2, np.float32), "absent": None}, CPU)
    assert sent.keys() == {"there"}


def test_one_buffer_holds_arrays_of_every_kind() -> None:
    """Sizes that leave the next array at an odd place, were places not rounded up."""
    arrays: dict[str, NDArray[Any]] = {
        "ints": np.arange(5, dtype=np.int64) - 2**40,
        "borders": np.array([0, 3, 7], np.int32),
        "flags": np.array([True, False, True]),
        "none": np.zeros(0, np.int64),
        "halves": np.array([1.5, -2.0, 0.25], np.float16),
        "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
        "every second": np.arange(10, dtype=np.float64)[::2],
    }
    for array in arrays.values():
        array.flags.writeable = False
    size = buffer_size(arrays)
    buffer = torch.full((size,), 255, dtype=torch.uint8)
    found = dict(views(arrays, buffer))
    for name, array in arrays.items():
        np.copyto(found[name].numpy(), array)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
        assert found[name].numpy().dtype == array.dtype, name
        assert found[name].untyped_storage().data_ptr() == buffer.data_ptr(), name
    used = sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values())
    starts = [view.data_ptr() - buffer.data_ptr() for view in found.values() if view.numel()]
    assert size == used and not any(start % ALIGNMENT for start in starts)


def pinning_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that may pin what they make, with their file and line."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and any(k.arg == "pin_memory" for k in node.keywords):
                yield f"{path}:{node.lineno}", node


def test_what_is_pinned_is_on_the_host_under_any_default_device() -> None:
    """PyTorch cannot pin what a default device has put on a card, and only a card would show it."""
    places = {
        place: [ast.unparse(k.value) for k in call.keywords if k.arg == "device"]
        for place, call in pinning_calls()
    }
    assert len(places) >= 4 and [p for p, where in places.items() if where != ["'cpu'"]] == []


def test_no_code_pins_while_it_makes_a_tensor_of_data() -> None:
    """PyTorch refuses that for NumPy arrays, and only a card would show it."""
    makers = {"tensor", "as_tensor", "asarray", "from_numpy"}
    wrong = [
        place
        for place, call in pinning_calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr in makers
    ]
    assert len(SOURCES) > 100 and not wrong
    with pytest.raises(RuntimeError, match="pin"):
        torch.tensor(np.zeros(2), pin_memory=True)


def test_columns_cross_with_their_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    pack, copies = a_pack(), []

    def counted(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        copies.append(arrays)
        return send(arrays, device)

    monkeypatch.setattr(policy, "send", counted)
    advantages_L = np.arange(len(pack.targets_L), dtype=np.float32)
    tensors, sent = PackTensors.with_columns(pack, {ADVANTAGES: advantages_L}, CPU)
    assert len(copies) == 1 and sent.keys() == {ADVANTAGES}
    assert sent[ADVANTAGES].tolist() == advantages_L.tolist()
    assert tensors.targets_L.tolist() == pack.targets_L.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
def test_a_pack_reaches_a_card_in_one_copy_and_the_host_does_not_wait() -> None:
    pack, card = a_pack(), torch.device("cuda")
    torch.zeros(1, device=card)  # CUDA's own start
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = PackTensors.from_pack(pack, card)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = PackTensors.from_pack(pack, CPU)
    assert wanted.layout.keys_K is not None and found.layout.keys_K is not None
    pairs = (
        (found.tokens_T, wanted.tokens_T),
        (found.positions_T, wanted.positions_T),
        (found.predictor_L, wanted.predictor_L),
        (found.targets_L, wanted.targets_L),
        (found.cu_loss_tokens, wanted.cu_loss_tokens),
        (found.layout.cu_queries, wanted.layout.cu_queries),
        (found.layout.cu_keys, wanted.layout.cu_keys),
        (found.layout.keys_K, wanted.layout.keys_K),
    )
    for one, other in pairs:
        assert one.is_cuda and torch.equal(one.cpu(), other) and one.dtype == other.dtype
    assert len({one.untyped_storage().data_ptr() for one, _ in pairs}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
def test_what_is_kept_on_the_host_comes_back_and_the_host_does_not_wait() -> None:
    card = torch.device("cuda")
    states = torch.randn(512, 256, device=card)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = [keep_on_host(states * factor) for factor in (1, 2, 3)]
        back = [one.to(card, non_blocking=True) for one in kept]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.is_pinned() for one in kept)
    assert all(
        torch.equal(one, states * factor) for one, factor in zip(back, (1, 2, 3), strict=True)
    )
