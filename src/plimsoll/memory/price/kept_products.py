"""What selective checkpointing keeps of a layer beside its input: model/checkpointing.py, KEPT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.memory.price.activation_form import ActivationForm
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape

_LOG_SUM_EXP = 4  # bytes for each token and head


@dataclass(frozen=True)
class KeptProducts:
    """Of one layer, in bytes: the results of its linears, the attention's output, and the result of
    the last linear, which the backward pass neither reads nor computes again."""

    linears: int
    attention: int
    last: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.linears + self.attention


def kept_products(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> KeptProducts:
    """Experts' products are computed again, and so is attention whose scores are written out."""
    element, tokens = form.element, work.tokens
    attention = tokens * shape.heads * (element * shape.head_dim + _LOG_SUM_EXP)
    return KeptProducts(
        linears=tokens * sum(_widths(shape, form)),
        attention=0 if shape.softcapped or form.attention == "eager" else attention,
        last=0 if shape.experts else element * tokens * shape.hidden,
    )


def _widths(shape: ModelShape, form: ActivationForm) -> Iterator[int]:
    """Bytes of a token's result in each linear and in each matrix of an adapter."""
    for linear in shape.linears:
        if linear.stacked > 1:
            continue
        yield form.element * linear.outputs
        if form.adapter is not None and form.adapts(linear.name):
            thin = form.adapter.rank < shape.hidden // 2  # then its second matrix is computed again
            yield form.adapter.element * (form.adapter.rank + (0 if thin else linear.outputs))
