"""Weights on their way out of the trainer: in buckets to engines, and in files.

The files are for other programs, too: the full trained model, or the adapter alone. Tensors have
their Hugging Face names.

ZeRO-3 shards are gathered one bucket at a time, so the full model is never on one GPU. A tied head
is sent twice, under both names: on CPU, vLLM keeps a packed copy of the head, and renews it only
for a tensor with the head's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from plimsoll.model.adapters import (
    adapter_bytes,
    parts_of_weight,
    plain_weight,
    save_adapter,
    tensors_for_engines,
)
from plimsoll.model.disturbance import UNSCALED, Scaled, scalable_layers
from plimsoll.model.files import (
    Companions,
    hf_state_names,
    plain_name,
    published_weights,
    save_hf,
    saved_buffers,
    weights_for_files,
)
from plimsoll.model.policy import PolicyModel, ValueModel
from plimsoll.model.quantization import plain_shape
from plimsoll.sync.buckets import WeightBucket, packed_bytes, ship_bucket
from plimsoll.sync.channel import Outlet
from plimsoll.sync.proof import Rehearsal
from plimsoll.trainer.price import SAVE_BUCKET
from plimsoll.trainer.protocol import Engine

_IN_LAYER = re.compile(r"\.\d+\.")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of an expert in the name of its weight in published files."""


@dataclass(frozen=True)
class PlannedBucket:
    """What is sent together.

    Attributes:
        names: the names in the module of the parameters.
        experts: the first and one past the last expert, of a parameter that stacks experts and is
            larger than a bucket; None: all.
        goes_on: whether the next bucket has further experts of the same parameter.
    """

    names: tuple[str, ...]
    experts: tuple[int, int] | None = None
    goes_on: bool = False

    @property
    def rows(self) -> slice:
        """The rows of the parameters that are sent: those of the experts, or all."""
        return slice(None) if self.experts is None else slice(*self.experts)


@dataclass(frozen=True)
class WeightPlan:
    """The weights of a policy on their way to engines.

    Attributes:
        names: the Hugging Face names of all tensors.
        buckets: what is sent, one after the other.
        sizes: packed bytes of each bucket.
    """

    names: tuple[str, ...]
    buckets: tuple[PlannedBucket, ...]
    sizes: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Packed bytes of the largest bucket."""
        return max(self.sizes, default=0)


def plan_weights(
    engine: Engine,
    bucket_bytes: int,
    as_published: bool,
    only_trained: bool,
    layers: Collection[str] | None = None,
) -> WeightPlan:
    """Return the plan by which a `WeightSender` sends a policy's weights.

    Args:
        engine: the policy's engine.
        bucket_bytes: see `plan_buckets`.
        as_published: see `WeightSender.ship`.
        only_trained: leave out what training does not change.
        layers: the layers to send, with what follows one another with them; None: all.
    """
    policy = engine.module
    assert isinstance(policy, PolicyModel)
    names: list[str] = []
    sizes: list[int] = []
    buckets: list[PlannedBucket] = []
    for together in plan_buckets(engine, bucket_bytes, only_trained, layers):
        frames = {plain_name(n): _frame(policy.get_parameter(n)) for n in together}
        whole = PlannedBucket(together)
        cuts = _cut_experts(policy, whole, frames, bucket_bytes) if as_published else ()
        for bucket in cuts or (whole,):
            rows = {name: frame[bucket.rows] for name, frame in frames.items()}
            tensors = _outgoing(policy, rows, bucket, as_published)
            names += tensors
            sizes.append(sum(packed_bytes(t.nbytes) for t in tensors.values()))
            buckets.append(bucket)
    return WeightPlan(tuple(names), tuple(buckets), tuple(sizes))


def _cut_experts(
    policy: PolicyModel, whole: PlannedBucket, frames: Mapping[str, Tensor], bucket_bytes: int
) -> tuple[PlannedBucket, ...]:
    """Return buckets of some experts each, if this is one weight that stacks too many for one.

    Return () if files have the stack as one tensor, too.
    """
    frame, *others = frames.values()
    if others or frame.dim() != 3 or frame.nbytes <= bucket_bytes:
        return ()
    experts = len(frame)
    step = max(1, bucket_bytes * experts // frame.nbytes)
    cuts = tuple(
        PlannedBucket(whole.names, (first, min(first + step, experts)), first + step < experts)
        for first in range(0, experts, step)
    )
    (name,) = frames
    rows = [(cut, {name: frame[cut.rows]}) for cut in cuts]
    in_cuts = [sent for cut, part in rows for sent in _outgoing(policy, part, cut, True)]
    return cuts if sorted(in_cuts) == sorted(_outgoing(policy, frames, whole, True)) else ()


def _frame(parameter: nn.Parameter) -> Tensor:
    """Return a tensor without data, of the undivided, dequantised parameter's shape and dtype."""
    return torch.empty(plain_shape(parameter), dtype=parameter.dtype, device="meta")


def plan_buckets(
    engine: Engine,
    bucket_bytes: int,
    only_trained: bool = False,
    layers: Collection[str] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of each bucket, in the model's order.

    A bucket holds at most `bucket_bytes`; a larger tensor gets its own bucket. Weights that an
    engine may merge into one layer, such as queries, keys and values, follow one another, and share
    a bucket if they fit: vLLM holds tensors until all of their layer are there. The names are those
    in the module; the tensors of adapters are not listed, but merged into these weights.

    With `only_trained`, weights that training does not change are left out if all that follow one
    another with them are: an engine rebuilds a merged layer from nothing, and needs all of it. The
    same holds for `layers`, the names in the module of those to send; None: all.
    """
    buckets: list[list[str]] = []
    room = 0
    blocks = _blocks(hf_state_names(engine.module))
    if only_trained:
        blocks = (names for names in blocks if any(learns(engine.module, n) for n in names))
    if layers is not None:
        wanted = weights_of_layers(layers)
        blocks = (names for names in blocks if any(plain_name(n) in wanted for n in names))
    for names in blocks:
        sizes = [_frame(engine.module.get_parameter(name)).nbytes for name in names]
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


def weights_of_layers(layers: Collection[str]) -> set[str]:
    """Return the Hugging Face names that weights and biases of these layers have."""
    return {f"{plain_name(layer)}.{leaf}" for layer in layers for leaf in ("weight", "bias")}


def learns(module: nn.Module, name: str) -> bool:
    """Return whether training changes what `plain_weight` returns."""
    return any(module.get_parameter(n).requires_grad for n in parts_of_weight(module, name))


@contextmanager
def plain_weights(
    engine: Engine, names: Sequence[str]
) -> Iterator[Callable[[slice], dict[str, Tensor]]]:
    """Yield a function that returns rows of these weights by their Hugging Face names.

    Adapters are merged into the weights, and quantised weights are dequantised. All ranks must
    enter the block together; only ranks that want the weights call the function.
    """
    module = engine.module
    with engine.gather([part for name in names for part in parts_of_weight(module, name)]):
        yield lambda rows: {plain_name(name): plain_weight(module, name, rows) for name in names}


class WeightSender:
    """Gathers buckets of a policy's weights on all ranks, and ships them from those that send.

    A weight of which several buckets are cut stays gathered until the last of them.
    """

    def __init__(self) -> None:
        self._gathered = ExitStack()
        self._weights: Callable[[slice], dict[str, Tensor]] | None = None

    def ship(
        self,
        engine: Engine,
        bucket: PlannedBucket,
        as_published: bool,
        outlet: Outlet | None,
        scaled: Scaled = UNSCALED,
    ) -> WeightBucket | None:
        """Ship a bucket of a policy's weights, and return it; None without an outlet.

        All ranks must call it together. A weight that is tied to one of these is added under its
        second name.

        Args:
            engine: the policy's engine.
            bucket: the bucket.
            as_published: give names and layout of published files, not those of transformers'
                modules.
            outlet: where it goes.
            scaled: the layers whose weights are sent scaled.
        """
        policy = engine.module
        assert isinstance(policy, PolicyModel)
        if self._weights is None or bucket.experts is None or bucket.experts[0] == 0:
            self._gathered.close()  # of a transfer that was broken off
            self._weights = self._gathered.enter_context(plain_weights(engine, bucket.names))
        try:
            if outlet is None:
                return None
            plain = self._weights(bucket.rows)
            of_scaled = weights_of_layers(scaled.layers) & plain.keys()
            multiplied = {name: plain[name] for name in of_scaled}
            names = _outgoing(policy, multiplied, bucket, as_published)
            tensors = _outgoing(policy, plain, bucket, as_published)
            return ship_bucket(tensors, outlet, dict.fromkeys(names, scaled.factor))
        finally:
            if not bucket.goes_on:
                self._weights = None
                self._gathered.close()


def _outgoing(
    policy: PolicyModel, weights: Mapping[str, Tensor], bucket: PlannedBucket, as_published: bool
) -> dict[str, Tensor]:
    """Return what is sent of these rows of a bucket's weights, by the names that engines know."""
    tied = {name: weights[of] for name, of in policy.tied_names.items() if of in weights}
    every = {**weights, **tied}
    if not as_published:
        return every
    if bucket.experts is None:
        return dict(published_weights(policy.lm, every))
    first = bucket.experts[0]

    def number(found: re.Match[str]) -> str:
        return str(first + int(found[0]))

    return {_EXPERT.sub(number, n): t for n, t in published_weights(policy.lm, every)}


def plan_rehearsals(engine: Engine) -> tuple[Rehearsal, ...]:
    """Return the rehearsals before a run; the last one leaves engines with the right weights."""
    groups = (*_groups(engine), ())
    pairs = zip(groups, ((), *groups), strict=False)
    return tuple(Rehearsal(Scaled(now), before) for now, before in pairs if now or before)


def _groups(engine: Engine) -> tuple[tuple[str, ...], ...]:
    """Return groups of layers of a policy; those of one group are scaled together.

    There is one layer of each kind, such as `mlp.up_proj`, of those that training changes. Kinds
    within the decoder's layers share a group as far as each finds a decoder layer of its own: two
    factors of one product, such as queries and keys, could cancel. The middle layers are
    taken if they suffice, because rounding grows most behind the first. Embedding and head, of
    which each alone changes every log-prob, have groups of their own.
    """
    policy = engine.module
    assert isinstance(policy, PolicyModel)
    learned = [
        kept
        for layers in scalable_layers(policy).values()
        if (kept := [name for name in layers if _is_learned(policy, name)])
    ]
    inner = [layers for layers in learned if len(layers) > 1]
    groups: list[tuple[str, ...]] = [(layers[0],) for layers in learned if len(layers) == 1]
    depth = max(map(len, inner), default=0)
    room = depth // 2 if depth // 2 >= len(inner) else depth
    wide = min(len(inner), room)
    for start in range(0, len(inner), wide or 1):
        places = range((depth - room) // 2, depth, room // wide)
        pairs = zip(inner[start : start + wide], places, strict=False)
        groups.append(tuple(layers[place * len(layers) // depth] for layers, place in pairs))
    return tuple(groups)


def _is_learned(policy: PolicyModel, layer: str) -> bool:
    inner = ".base_layer" if hasattr(policy.get_submodule(layer), "base_layer") else ""
    return learns(policy, f"{layer}{inner}.weight")


def write_model(engine: Engine, companion_files: Companions, directory: Path, rank: int) -> None:
    """Write the model as a Hugging Face directory; all ranks must call it.

    Weights are gathered bucket by bucket into rank 0's host memory.
    """
    state: dict[str, Tensor] = {}
    for names in plan_buckets(engine, SAVE_BUCKET):
        with plain_weights(engine, names) as weights:
            if rank == 0:
                every = weights(slice(None))
                state |= {name: t.to("cpu", copy=True) for name, t in every.items()}
    if rank == 0:
        model = _model(engine)
        state |= {name: buffer.cpu() for name, buffer in saved_buffers(model).items()}
        tensors = weights_for_files(model.lm, state)
        tokenizer, generation = companion_files.tokenizer, companion_files.generation
        save_hf(model.lm.config, tensors, tokenizer, directory, generation)


@dataclass(frozen=True)
class AdapterFiles:
    """A trained adapter as PEFT's two files, and the version of its weights."""

    config: bytes
    weights: bytes
    version: int


def write_adapter(engine: Engine, companion_files: Companions, directory: Path, rank: int) -> None:
    """Write the trained parameters, without the base, as a PEFT directory.

    All ranks must call it.
    """
    with _gather_trained(engine) as tensors:
        if rank == 0:
            save_adapter(_model(engine), tensors, companion_files, directory)


def adapter_files(engine: Engine, version: int, rank: int) -> AdapterFiles | None:
    """Return the adapter's files for vLLM on rank 0, None on others; all ranks must call it."""
    with _gather_trained(engine) as tensors:
        if rank > 0:
            return None
        model = _model(engine)
        return AdapterFiles(*adapter_bytes(model, tensors_for_engines(model, tensors)), version)


def _gather_trained(engine: Engine) -> AbstractContextManager[dict[str, Tensor]]:
    return engine.gather([n for n, p in engine.module.named_parameters() if p.requires_grad])


def _model(engine: Engine) -> PolicyModel | ValueModel:
    assert isinstance(engine.module, PolicyModel | ValueModel)
    return engine.module
