"""The stages of an engine (vLLM's pipeline parallelism): consecutive layers of its model, on cards
of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plimsoll.shapes.shape import ModelShape


@dataclass(frozen=True)
class Stage:
    """layers: how many. first: it embeds. last: it has the output head, and samples."""

    layers: int
    first: bool
    last: bool

    def held(self, shape: ModelShape) -> ModelShape:
        """What a stage has of a model, whose layers are taken to be alike. The table is one of the
        two: the embedding in the first stage, the head in the last, also where both are one tensor
        (models/qwen2.py); a stage between them has a vocabulary of 0."""
        if self.first and self.last:
            return shape
        return replace(
            shape,
            layers=self.layers,
            vocabulary=shape.vocabulary if self.first or self.last else 0,
            tied=True,
            head_bias=shape.head_bias and self.last,
            linears=tuple(replace(one, count=self._of(one.count, shape)) for one in shape.linears),
            other_tensors=tuple(
                replace(
                    one, parameters=one.elements * self._of(one.parameters // one.elements, shape)
                )
                for one in shape.other_tensors
            ),
        )

    def _of(self, count: int, shape: ModelShape) -> int:
        return -(-count * self.layers // shape.layers)


def stages_of(layers: int, count: int) -> tuple[Stage, ...]:
    """As vLLM 0.32 divides them (distributed/utils.py, `get_pp_indices`): evenly; of those left
    over one each to the stages before the last one, the latest first."""
    each, left = divmod(layers, count)
    return tuple(
        Stage(each + (count - 1 - left <= i < count - 1), i == 0, i == count - 1)
        for i in range(count)
    )
