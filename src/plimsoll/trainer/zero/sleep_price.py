"""The price of ranks that sleep: what leaves the card, and its copies in pinned host memory.

sleep.py copies each storage by itself, into a pinned block whose size is a power of two. Blocks go
back to PyTorch's cache when a rank wakes, not to the system, so they stay from the first sleep on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.model.price.form import adapter_tensors, whole_tensors
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.timeline.items import Life, Tensors, states_asleep, weights_asleep
from plimsoll.trainer.price import RoleWork
from plimsoll.trainer.zero.sizes import ZeroSizes
from plimsoll.trainer.zero.states import REDUCE_BUCKET

_BETWEEN_STEPS: tuple[Life, ...] = ("always", "built", "stepped")
_TRAINED = "trained parameters"

Pieces = Mapping[str, Sequence[tuple[int, int]]]
"""The storages of tensors that lie one by one: (elements of each, count), by `Tensors.of`."""


def with_sleep(
    tensors: Iterable[Tensors], sizes: ZeroSizes, role: TrainedRole | FrozenRole, work: RoleWork
) -> Iterator[Tensors]:
    """Yield a role's tensors, without those asleep while they sleep, and their copies."""
    states = states_asleep(work.rank_sleep)
    weights = weights_asleep(work.rank_sleep, work.name)
    pieces = _pieces(sizes, role, work)
    for tensor in tensors:
        asleep = weights if tensor.kind == "weights" else states
        moves = tensor.where == "device" and tensor.life in _BETWEEN_STEPS and tensor.elements
        if not (asleep and moves):
            yield tensor
            continue
        yield replace(tensor, asleep=asleep)
        if tensor.name != REDUCE_BUCKET:  # it holds nothing between steps
            yield from _copies(tensor, sizes, pieces)


def _copies(tensor: Tensors, sizes: ZeroSizes, pieces: Pieces) -> Iterator[Tensors]:
    """Yield the host copies of a tensor: of DeepSpeed's flat buffers, or of each storage."""
    source = f"trainer/zero/sleep.py; {tensor.source}"
    copy = replace(
        tensor, name=f"{tensor.name} asleep", where="host", life="stepped", source=source
    )
    if tensor.of not in pieces or (tensor.of == _TRAINED and sizes.stage > 0):
        share = -(-tensor.elements // tensor.ranks)
        in_groups = sizes.stage == 3 and tensor.kind == "optimizer states"
        yield replace(copy, pinned=min(share, sizes.sub_group) if in_groups else share)
        return
    for elements, count in pieces[tensor.of]:
        yield replace(copy, elements=elements * count, pinned=-(-elements // tensor.ranks))


def _pieces(sizes: ZeroSizes, role: TrainedRole | FrozenRole, work: RoleWork) -> Pieces:
    shape, in_4_bits = work.shape, role.model.quantization == "nf4"
    every = [
        (tensors.elements, tensors.parameters // tensors.elements)
        for tensors in parameter_tensors(shape, work.head == "value")
    ]
    linears = [
        (linear.inputs * linear.outputs, linear.count)
        for linear in shape.linears
        if linear.stacked == 1 and in_4_bits
    ]
    narrow = {elements for elements, _ in linears}
    plain = [piece for piece in every if piece[0] not in narrow]
    adapter = role.adapter if isinstance(role, TrainedRole) else None
    pairs = [] if adapter is None else [(size, n) for n, size in adapter_tensors(shape, adapter)]
    whole = [] if adapter is None else [(size, 1) for size in whole_tensors(shape, adapter)]
    return {
        _TRAINED: [*pairs, *whole] or every,
        "frozen parameters": plain,
        "parameters in 4 bits": linears,
        "parameters": [*every, *pairs],
        "of small tensors": [p for p in (*plain, *pairs) if p[0] <= sizes.persistence],
    }
