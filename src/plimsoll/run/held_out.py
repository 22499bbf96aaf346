"""What a run's evaluations say of held-out data, as numbers with their intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plimsoll.run.panels import metric_names
from plimsoll.run.rows import Row


@dataclass(frozen=True)
class Estimate:
    """A number, and the bounds of its 95 % confidence interval where it has one. None: NaN."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """Such as `0.83`."""
        return "NaN" if self.value is None else f"{self.value:.4g}"

    @property
    def interval(self) -> str:
        """Such as `0.79 to 0.87`; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:.3g} to {self.high:.3g}"


def evaluations(rows: Iterable[Row], best_step: int | None) -> dict[str, Row]:
    """The first evaluation, that of the best step if there is one, and the last, by what they are;
    none twice."""
    found = {row["step"]: row for row in rows if metric_names([row], "eval/")}
    if len(found) < 2:
        return {f"step {step}": row for step, row in found.items()}
    steps = {"first": min(found), "best": best_step, "last": max(found)}
    shown = sorted({step for step in steps.values() if step in found})
    names = [" and ".join(name for name in steps if steps[name] == step) for step in shown]
    return {f"{name}, step {step}": found[step] for name, step in zip(names, shown, strict=True)}


def held_out_figures(shown: Collection[Row]) -> dict[str, list[Estimate | None]]:
    """By metric: its number in each of the evaluations, None in those that do not have it. The
    bounds of an interval are in the number that they are of."""
    names = metric_names(shown, "eval/")
    bounds = {name: [f"{name}_low", f"{name}_high"] for name in names}
    whole = {name: ends for name, ends in bounds.items() if set(ends) <= set(names)}
    told = {end for ends in whole.values() for end in ends}
    return {
        name: [_estimate(row, name, whole.get(name, ())) for row in shown]
        for name in names
        if name not in told
    }


def _estimate(row: Row, name: str, bounds: Sequence[str]) -> Estimate | None:
    return Estimate(row[name], *(row.get(bound) for bound in bounds)) if name in row else None
