"""The stages of an engine (vLLM's pipeline parallelism).

A stage has consecutive layers of the model, on cards of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plimsoll.shapes.shape import ModelShape


@dataclass(frozen=True)
class Stage:
    """A stage of an engine.

    Attributes:
        layers: the number of its layers.
        first: whether it embeds.
        last: whether it has the output head, and samples.
    """

    layers: int
    first: bool
    last: bool

    def part_of(self, shape: ModelShape) -> ModelShape:
        """Return the stage's part of a model, whose layers are taken to be alike.

        Its table is the embedding in the first stage and the head in the last, also where both are
        one tensor (models/qwen2.py). A stage between them has no table: a vocabulary of 0.
        """
        if self.first and self.last:
            return shape
        return replace(
            shape,
            layers=self.layers,
            vocabulary=shape.vocabulary if self.first or self.last else 0,
            tied=True,
            head_bias=shape.head_bias and self.last,
            linears=tuple(
                replace(tensor, count=self._of(tensor.count, shape)) for tensor in shape.linears
            ),
            other_tensors=tuple(
                replace(
                    tensor,
                    parameters=tensor.elements
                    * self._of(tensor.parameters // tensor.elements, shape),
                )
                for tensor in shape.other_tensors
            ),
        )

    def _of(self, count: int, shape: ModelShape) -> int:
        return -(-count * self.layers // shape.layers)


def stages_of(layers: int, count: int) -> tuple[Stage, ...]:
    """Return the stages over which vLLM 0.32 divides layers.

    All stages get equally many layers. Layers left over go one each to the stages before the last
    one, the latest first (distributed/utils.py, `get_pp_indices`).
    """
    each, left = divmod(layers, count)
    return tuple(
        Stage(each + (count - 1 - left <= i < count - 1), i == 0, i == count - 1)
        for i in range(count)
    )
