"""An environment of verifiers: sums of two numbers; a reply is right that ends with the sum."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):  # type: ignore[misc]
    """A problem with its answer."""

    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One problem."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        """Return 1 for a right reply, else 0."""
        return float(trace.last_reply.endswith(f"#### {task.answer}"))


class SumsConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The number of problems, and the seed that draws them."""

    size: int = 512
    seed: int = 0


class Sums(vf.Taskset[Sum, SumsConfig]):  # type: ignore[misc]
    """Sums of two numbers of two digits."""

    def load(self) -> Iterator[Sum]:
        """Yield the problems."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.size):
            a, b = draw.randrange(10, 100), draw.randrange(10, 100)
            yield Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
