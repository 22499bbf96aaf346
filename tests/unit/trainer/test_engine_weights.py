"""Weight buckets: which parameters share one, and that bytes and hashes are the tensors' own."""

from __future__ import annotations

import pytest
import torch
import xxhash
from buckets import bucket_of, tensors_in
from decided import decided_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from plimsoll.config.engine import FrozenRole, OptimizerConfig
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.weights import plan_buckets
from plimsoll.trainer.zero.frozen import FrozenZeroEngine
from plimsoll.trainer.zero.optimizer import parameter_groups


def engine_of(module: nn.Module) -> FrozenZeroEngine:
    place = Place(0, 1, "127.0.0.1", 0, "cpu", threads=1)
    return FrozenZeroEngine(
        module, FrozenRole(model=decided_model(path="none", dtype="float32")), place
    )


def layers() -> nn.Sequential:
    """fp32 weights of 24, 400 and 48 bytes, biases of 12, 40 and 12."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(10, 10), nn.Linear(4, 3))


def test_buckets_are_filled_in_the_models_order() -> None:
    plan = plan_buckets(engine_of(layers()), 100)
    assert plan == (("0.weight", "0.bias"), ("1.weight",), ("1.bias", "2.weight", "2.bias"))


def test_a_bucket_may_be_exactly_full_and_no_fuller() -> None:
    small = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    assert plan_buckets(engine_of(small), 36) == (("0.weight", "0.bias"), ("1.weight", "1.bias"))
    assert [len(names) for names in plan_buckets(engine_of(small), 35)] == [1, 1, 1, 1]
    assert len(plan_buckets(engine_of(small), 72)) == 1


class Block(nn.Module):
    """Queries, keys and values of 16 bytes each; a norm of 8."""

    def __init__(self) -> None:
        super().__init__()
        parts = {name: nn.Linear(2, 2, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        self.attention = nn.ModuleDict(parts)
        self.norm = nn.LayerNorm(2, bias=False)


def test_what_an_engine_merges_into_one_layer_is_in_one_bucket_where_it_fits() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    [first, second] = (
        tuple(f"layers.{i}.attention.{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))
        for i in range(2)
    )
    norms = [(f"layers.{i}.norm.weight",) for i in range(2)]
    outer = nn.ModuleDict({"model": module})

    def plan(bucket: int) -> list[tuple[str, ...]]:
        found = plan_buckets(engine_of(outer), bucket)
        return [tuple(name.removeprefix("model.") for name in names) for names in found]

    assert plan(64) == [first + norms[0], second + norms[1]]
    assert plan(103) == plan(64)  # 47 bytes are left for the 48 of the second's attention
    assert plan(104) == [first + norms[0] + second, norms[1]]
    assert plan(40) == [first[:2], first[2:] + norms[0] + second[:1], second[1:] + norms[1]]


def test_a_tied_parameter_is_in_one_bucket() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    assert plan_buckets(engine_of(module), 1000) == (("0.weight",),)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])
SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3)


@given(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=6))
def test_a_bucket_gives_back_its_tensors(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    """Tensors have any dtypes and shapes in any order, so any offset."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": (torch.randn(shape, generator=generator) * 50).to(dtype)
        for i, (dtype, shape) in enumerate(kinds)
    }
    bucket = bucket_of(tensors)
    assert [sent.name for sent in bucket.tensors] == list(tensors)
    found = tensors_in(bucket)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_tensor_that_is_not_contiguous_is_laid_out_row_by_row() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    bucket = bucket_of({"w": tensor})
    assert torch.equal(tensors_in(bucket)["w"], tensor)
    assert bucket.tensors[0].shape == (3, 2)
    rows = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]).numpy().tobytes()
    assert bucket.tensors[0].checksum == xxhash.xxh3_64_intdigest(rows)


@pytest.mark.parametrize("index", [0, 1499, 2999])
def test_one_changed_number_changes_the_checksum(index: int) -> None:
    tensor = torch.zeros(3000, dtype=torch.bfloat16)
    before = bucket_of({"w": tensor}).tensors[0].checksum
    tensor[index] = 2.0**-100
    assert bucket_of({"w": tensor}).tensors[0].checksum != before


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    module[3].requires_grad_(False)
    decayed, plain = parameter_groups(module, OptimizerConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert _ids(decayed["params"]) == [id(module[0].weight), id(module[1].weight)]
    assert _ids(plain["params"]) == [id(module[1].bias), id(module[2].weight), id(module[2].bias)]


def test_embeddings_and_tied_heads_can_be_spared() -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3, bias=False))
    module[2].weight = module[0].weight
    settings = OptimizerConfig(weight_decay=0.1, decay_embeddings=False)
    decayed, plain = parameter_groups(module, settings)
    assert _ids(decayed["params"]) == [id(module[1].weight)]
    assert _ids(plain["params"]) == [id(module[0].weight), id(module[1].bias)]


def test_a_group_without_parameters_is_left_out() -> None:
    (only,) = parameter_groups(nn.Linear(2, 2, bias=False), OptimizerConfig(weight_decay=0.1))
    assert only["weight_decay"] == 0.1


def test_no_group_is_too_long_for_8_bits() -> None:
    """bitsandbytes counts a group's row on CUDA in 32 bits; nothing is allocated here."""
    width = 2**15  # 2**30 elements
    large = [nn.Linear(width, width, device="meta") for _ in range(3)]
    module = nn.Sequential(*large, nn.Linear(width, 2 * width, bias=False, device="meta"))
    wide = parameter_groups(module, OptimizerConfig(weight_decay=0.1))
    assert [len(_ids(group["params"])) for group in wide] == [4, 3]
    groups = parameter_groups(module, OptimizerConfig(weight_decay=0.1, kind="adamw_8bit"))
    assert [group["weight_decay"] for group in groups] == [0.1] * 4 + [0.0]
    found = [one for group in groups for one in _ids(group["params"])]
    assert found == [one for group in wide for one in _ids(group["params"])]


def _ids(parameters: object) -> list[int]:
    assert isinstance(parameters, list)
    found: list[Tensor] = parameters
    return [id(parameter) for parameter in found]
