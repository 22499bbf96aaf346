"""Weights, gradients and states of Colossal-AI's ZeRO-1 and 2 on one rank.

colossalai/zero/low_level/low_level_optim.py and bookkeeping/bucket_store.py, 0.3.6 to 0.4: nothing
is allocated before there are gradients, a share of each is kept in 16 bits until the step, also
where masters and moments are in host memory, and for the step all of them are copied in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from peak_rows import Row
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.timeline.tensors import Kept

_SOURCE = "colossalai/zero/low_level"


def low_level_zero(row: Row, trained: int, base: int, bucket: int) -> Iterator[Kept]:
    """base: bytes of what is frozen. bucket: elements that are reduced at once; a larger tensor is
    reduced alone."""
    ranks, offload = row.ranks, row.optimizer_offload
    shared = ranks if row.strategy != "zero1" else 1
    tensors = [one.elements for one in parameter_tensors(row.shape) if row.adapter is None]
    largest = max(tensors, default=0)
    yield Kept("weights", "base", "bytes", base, 1, _SOURCE)
    yield Kept("weights", "weights", "trained", trained, 2, _SOURCE)
    yield Kept("weights", "gradients", "trained", trained, 2, _SOURCE, shared, life="training")
    # build_grad_in_bucket, get_flatten_grad and reduce_scatter's own list
    at_once = min(max(bucket, largest), trained)
    yield Kept(
        "weights", "copies of a bucket", "elements", at_once, 3 * 2, _SOURCE, life="reducing"
    )
    norm = 8 if not offload else 8 + 4  # compute_norm, in double; a copy on its way to the host
    yield Kept(
        "weights", "norm of a gradient", "elements", largest, norm, _SOURCE, ranks, life="norming"
    )
    if not offload:
        yield Kept("weights", "masters", "trained", trained, 4, _SOURCE, ranks, life="built")
        yield Kept(
            "weights", "moments", "trained", trained, row.moments, _SOURCE, ranks, life="stepped"
        )
        yield Kept(
            "weights", "gradients in fp32", "trained", trained, 4, _SOURCE, ranks, life="norming"
        )
