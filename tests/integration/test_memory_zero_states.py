"""The plan's states of a trained role against the tensors that a real DeepSpeed engine holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from choice import slow
from decided import decided_model, decided_role
from torch import Tensor, UntypedStorage, nn

from plimsoll.config.engine import TrainedRole
from plimsoll.engine.process_group import Place, free_port, join, leave
from plimsoll.engine.zero.buffers import norm_copies
from plimsoll.engine.zero.engine import ZeroEngine
from plimsoll.engine.zero.settings import deepspeed_settings
from plimsoll.engine.zero.sizes import Counts, moment_bytes, zero_sizes
from plimsoll.engine.zero.states import zero_states
from plimsoll.timeline.tensors import Life, Tensors
from traced_bytes import LiveBytes

_WIDTH, _LAYERS, _FROZEN = 256, 8, 3
_BETWEEN_STEPS: tuple[Life, ...] = ("always", "built", "stepped")

CASES = [
    # stage, dtype, optimizer offload, parameter offload, gradient dtype
    (0, "float32", "none", "none", "auto"),
    (0, "bfloat16", "none", "none", "auto"),
    (1, "float32", "none", "none", "auto"),
    (1, "bfloat16", "none", "none", "auto"),
    (1, "bfloat16", "cpu", "none", "auto"),
    (2, "float32", "none", "none", "auto"),
    (2, "bfloat16", "none", "none", "auto"),
    (2, "bfloat16", "none", "none", "bfloat16"),
    (2, "bfloat16", "cpu", "none", "auto"),
    (2, "float32", "cpu", "none", "auto"),
    (3, "float32", "none", "none", "auto"),
    (3, "bfloat16", "none", "none", "auto"),
    (3, "bfloat16", "none", "none", "bfloat16"),
    (3, "bfloat16", "cpu", "none", "auto"),
    (3, "bfloat16", "cpu", "cpu", "auto"),
]
NARROW_STATES = [
    (1, "bfloat16", "none", "none", "bfloat16"),
    (1, "bfloat16", "cpu", "none", "auto"),
    (2, "bfloat16", "none", "none", "auto"),
    (2, "bfloat16", "none", "none", "bfloat16"),
    (2, "bfloat16", "cpu", "none", "auto"),
    (2, "bfloat16", "cpu", "none", "bfloat16"),
    (3, "bfloat16", "none", "none", "auto"),
    (3, "bfloat16", "none", "none", "bfloat16"),
    (3, "bfloat16", "cpu", "none", "auto"),
    (3, "bfloat16", "cpu", "cpu", "bfloat16"),
]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    place = Place(0, 1, 0, "127.0.0.1", free_port(), "cpu", 1)
    join(place)
    yield place
    leave()


RARE = [case for case in CASES if case[0] in (1, 3) and case[1] == "float32"]
RARE += [(1, "bfloat16", "none", "none", "auto"), (2, "bfloat16", "none", "none", "auto")]
RARE += [(3, "bfloat16", "cpu", "none", "auto")]
"""Whose stage, numbers and offload others have, one by one."""


@pytest.mark.parametrize(
    "case",
    [slow(case) if case in RARE else case for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_the_plan_counts_what_deepspeed_holds(
    place: Place, case: tuple[int, str, str, str, str]
) -> None:
    _compare(place, case, adapted=False)


@pytest.mark.parametrize(
    "case",
    [NARROW_STATES[0], NARROW_STATES[-1], *map(slow, NARROW_STATES[1:-1])],
    ids=lambda case: "-".join(map(str, case)),
)
def test_the_plan_counts_states_in_bfloat16(
    place: Place, case: tuple[int, str, str, str, str]
) -> None:
    _compare(place, case, adapted=False, states="bfloat16")


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_the_plan_counts_states_of_what_is_trained_only(place: Place, stage: int) -> None:
    _compare(place, (stage, "bfloat16", "none", "none", "auto"), adapted=True)


def _compare(
    place: Place, case: tuple[int, str, str, str, str], adapted: bool, states: str = "float32"
) -> None:
    role = _role(case, states)
    before = _storages()
    with LiveBytes() as live:
        module = _module(role.model.dtype, adapted)
        counts = replace(_counts(module), moments=moment_bytes(role))
        sizes = zero_sizes(deepspeed_settings(role, "cpu", 1), 1)
        plan = (*zero_states(counts, sizes, "cpu"), *norm_copies(counts, sizes, "cpu"))
        engine = ZeroEngine(module, role, place)
        _backward(engine)
        engine.step(1e-4)
        assert _held(before) == pytest.approx(_bytes(plan, *_BETWEEN_STEPS), rel=0.01)
        _backward(engine)
        _backward(engine)
        training: tuple[Life, ...] = (*_BETWEEN_STEPS, "training")
        assert _held(before) == pytest.approx(_bytes(plan, *training), rel=0.01)
        live.enter("step")
        engine.step(1e-4)
    norm, step = (_bytes(plan, *training, life) for life in ("norming", "stepping"))
    assert live.peaks["step"] == pytest.approx(max(norm, step), rel=0.01)


def _role(case: tuple[int, str, str, str, str], states: str) -> TrainedRole:
    stage, dtype, optimizer, parameter, gradient = case
    role = TrainedRole.model_validate(
        {
            "model": decided_model("none", dtype=dtype),
            "zero": {
                "stage": stage,
                "optimizer_offload": optimizer,
                "parameter_offload": parameter,
                "gradient_dtype": gradient,
                "state_dtype": states,
                "bucket_elements": 1000,
            },
        }
    )
    return decided_role(role)


def _module(dtype: str, adapted: bool) -> nn.Module:
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    for layer in layers[:_FROZEN] if adapted else []:
        layer.requires_grad_(False)
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def _counts(module: nn.Module) -> Counts:
    trained = [p for p in module.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    return Counts(
        trained=count,
        frozen=sum(p.numel() for p in module.parameters()) - count,
        largest=max(p.numel() for p in trained),
        element=trained[0].element_size(),
    )


def _backward(engine: ZeroEngine) -> None:
    x = torch.randn(2, _WIDTH, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine.forward(x).float().square().mean())


def _held(before: dict[int, UntypedStorage]) -> int:
    return sum(one.nbytes() for start, one in _storages().items() if start not in before)


def _bytes(kept: Iterable[Tensors], *lives: Life) -> int:
    """Of those that live so."""
    return sum(one.bytes for one in kept if one.life in lives)


def _storages() -> dict[int, UntypedStorage]:
    """The memory of all live tensors and gradients, by address; kept alive, or its address could
    be given to others."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = (t.untyped_storage() for t in [*tensors, *grads] if t.device.type == "cpu")
    return {storage.data_ptr(): storage for storage in storages}


def test_the_search_finds_tensors() -> None:
    before = _storages()
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.sum().backward()
    assert _held(before) == 8000
