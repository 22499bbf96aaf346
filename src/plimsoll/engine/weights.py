"""Weights on their way out of the trainer: in buckets, by their Hugging Face names.

ZeRO-3 shards are gathered one bucket at a time, so the full model is never on one GPU. A tied head
is sent twice, under both names: on CPU, vLLM keeps a packed copy of the head, and renews it only
for a tensor with the head's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.engine.protocol import Engine
from plimsoll.model.adapters import parts_of_weight, plain_weight
from plimsoll.model.policy import PolicyModel, hf_state_names, published_weights
from plimsoll.model.quantization import plain_shape

_IN_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class SentTensor:
    """One tensor of a bucket: Hugging Face name, dtype, shape, size, and a hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    hash: str


@dataclass(frozen=True)
class WeightBucket:
    """Undivided tensors, packed in `data` (uint8); each begins at a multiple of 8 bytes."""

    tensors: tuple[SentTensor, ...]
    data: NDArray[np.uint8]


def plan_buckets(engine: Engine, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of each bucket, in the model's order.

    A bucket holds at most `bucket_bytes`; a larger tensor gets its own bucket. Weights that an
    engine may merge into one layer, such as queries, keys and values, follow one another, and share
    a bucket if they fit: vLLM holds tensors until all of their layer are there. The names are those
    in the module; the tensors of adapters are not listed, but merged into these weights.
    """
    buckets: list[list[str]] = []
    room = 0
    for names in _blocks(hf_state_names(engine.module)):
        sizes = [_plain_bytes(engine.module.get_parameter(name)) for name in names]
        together = sum(sizes) <= bucket_bytes
        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            needed = sum(sizes) if together and place == 0 else size
            if needed > room or not buckets:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(name)
            room -= size
    return tuple(tuple(names) for names in buckets)


def _blocks(hf_names: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield groups of the module's parameter names that should be sent together.

    In a decoder layer, a group is one part (attention, MLP, norms); elsewhere it is one module.
    `hf_names` maps names in the module to Hugging Face names, as `hf_state_names` returns them.
    """
    blocks: dict[str, list[str]] = {}
    for name, hf_name in hf_names.items():
        ends = 2 if _IN_LAYER.search(hf_name) else 1
        blocks.setdefault(hf_name.rsplit(".", ends)[0], []).append(name)
    yield from blocks.values()


@contextmanager
def plain_weights(
    engine: Engine, names: Sequence[str]
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Yield a function that returns these weights by their Hugging Face names.

    Adapters are merged into the weights, and quantised weights are dequantised. All ranks must
    enter the block together; only ranks that want the weights call the function.
    """
    module = engine.module
    hf_names = hf_state_names(module)
    with engine.gather([part for name in names for part in parts_of_weight(module, name)]):
        yield lambda: {hf_names[name]: plain_weight(module, name) for name in names}


def sent_names(policy: PolicyModel, as_published: bool) -> tuple[str, ...]:
    """Return the Hugging Face names of all tensors that `gather_bucket` gives for a policy."""
    frames = {
        hf_name: torch.empty(plain_shape(policy.get_parameter(name)), device="meta")
        for name, hf_name in hf_state_names(policy).items()
    }
    return tuple(_with_ties(policy, frames, as_published))


def gather_bucket(
    engine: Engine, names: Sequence[str], as_published: bool, rank: int
) -> WeightBucket | None:
    """Return a bucket with these weights of a policy on rank 0, and None on other ranks.

    All ranks must call it together. A weight that is tied to one of these is added under its second
    name. `as_published`: give names and layout of published files, not those of transformers'
    modules.
    """
    policy = engine.module
    assert isinstance(policy, PolicyModel)
    with plain_weights(engine, names) as weights:
        return make_bucket(_with_ties(policy, weights(), as_published)) if rank == 0 else None


def _with_ties(
    policy: PolicyModel, weights: Mapping[str, Tensor], as_published: bool
) -> dict[str, Tensor]:
    tied = {name: weights[of] for name, of in policy.tied_names().items() if of in weights}
    all_weights = {**weights, **tied}
    return dict(published_weights(policy.lm, all_weights)) if as_published else all_weights


def make_bucket(tensors: Mapping[str, Tensor]) -> WeightBucket:
    """Return a bucket with copies of these tensors (by Hugging Face name) in host memory."""
    sent: list[SentTensor] = []
    data = torch.zeros(sum(_room(t.nbytes) for t in tensors.values()), dtype=torch.uint8)
    offset = 0
    for name, tensor in tensors.items():
        piece = data[offset : offset + tensor.nbytes]
        piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += _room(tensor.nbytes)
        digest = hash_bytes(piece)
        dtype = str(tensor.dtype).removeprefix("torch.")
        sent.append(SentTensor(name, dtype, tuple(tensor.shape), tensor.nbytes, digest))
    return WeightBucket(tuple(sent), data.numpy())


def hash_bytes(data: Tensor) -> str:
    """Return a fast hash (xxh3, 64 bits) of a contiguous tensor's bytes in host memory."""
    flat = data.flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(flat)  # type: ignore[arg-type]  # numpy is a Buffer


def read_bucket(bucket: WeightBucket) -> dict[str, Tensor]:
    """Return the tensors of a bucket, as views into its data."""
    data = torch.from_numpy(bucket.data)
    return split_bytes(bucket.tensors, data)


def split_bytes(tensors: Sequence[SentTensor], data: Tensor) -> dict[str, Tensor]:
    """Return the tensors that are packed in a uint8 tensor: views into it, by name."""
    pieces: dict[str, Tensor] = {}
    offset = 0
    for sent in tensors:
        piece = data[offset : offset + sent.bytes]
        pieces[sent.name] = piece.view(getattr(torch, sent.dtype)).view(sent.shape)
        offset += _room(sent.bytes)
    return pieces


def _room(size: int) -> int:
    """Return the size rounded up to a multiple of 8 bytes, at which any dtype may begin."""
    return -(-size // 8) * 8


def _plain_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of the undivided parameter, dequantised if it is quantised."""
    return math.prod(plain_shape(parameter)) * parameter.element_size()
