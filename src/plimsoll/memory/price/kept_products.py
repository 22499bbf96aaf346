"""What selective checkpointing keeps of a layer beside its input: model/checkpointing.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.memory.price.activation_form import ActivationForm
from plimsoll.shapes.shape import Linear, MicroBatch, ModelShape

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
    unkept = shape.softcapped or form.attention == "eager" or form.written
    linears = sum(_width(form, shape, one) * one.count // shape.layers for one in _plain(shape))
    return KeptProducts(
        linears=tokens * linears,
        attention=0 if unkept else attention,
        last=0 if shape.experts else element * tokens * shape.hidden,
    )


def _plain(shape: ModelShape) -> Iterator[Linear]:
    return (linear for linear in shape.linears if linear.stacked == 1)


def _width(form: ActivationForm, shape: ModelShape, linear: Linear) -> int:
    """Bytes of a token's result in a linear layer and in each matrix of its adapter."""
    adapter = form.adapter
    if adapter is None or not form.adapts(linear.name):
        return form.element * linear.outputs
    again = adapter.dora and adapter.dropout  # on the thinned input
    thin = adapter.rank < shape.hidden // 2  # then its second matrix is computed again
    own = adapter.element * (adapter.rank + (0 if thin else linear.outputs))
    return form.element * linear.outputs * (1 + again) + own
