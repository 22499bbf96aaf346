"""Compare a disturbed run with the undisturbed one: steps, samples, metrics and final weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from plimsoll.errors import PlimsollError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import read_rows

_CLOCKED = re.compile(r"seconds|memory_bytes/|tokens_per_second|mfu$|gpu_busy$|busy|idle")
"""Metrics that a clock or the machine decides: no two runs have the same."""
_SAMPLED = ["group", "sample_index", "tokens", "parts"]
"""The columns by which samples are compared."""


@dataclass(frozen=True)
class Likeness:
    """How a run differs from the undisturbed one; an empty text means that they are equal."""

    steps: str
    """Steps that are missing in metrics.jsonl or come twice."""
    samples: str
    """The first step whose samples differ."""
    metrics: str
    """The first step whose metrics differ, with the first metric."""
    weights: str
    """The first file of the final model that differs."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.steps or self.samples or self.metrics or self.weights)


def compare_runs(disturbed: Path, undisturbed: Path) -> Likeness:
    """Return how a run differs from the undisturbed one."""
    ours, others = RunDirectory(disturbed), RunDirectory(undisturbed)
    try:
        rows, expected = _metrics(ours), _metrics(others)
    except (PlimsollError, OSError) as error:
        return Likeness(f"metrics.jsonl cannot be read: {error}", "", "", "")
    return Likeness(
        _compare_steps(rows, expected),
        _compare_samples(ours, others),
        _compare_metrics(rows, expected),
        _compare_weights(ours.model_path, others.model_path),
    )


MetricRows = list[dict[str, object]]


def _metrics(run: RunDirectory) -> MetricRows:
    return read_rows(run.metrics_path) if run.metrics_path.is_file() else []


def _compare_steps(rows: MetricRows, expected: MetricRows) -> str:
    counts = Counter(row["step"] for row in rows)
    wanted = [row["step"] for row in expected]
    missing = [step for step in wanted if not counts[step]]
    repeated = [step for step, count in counts.items() if count > 1]
    texts = [f"missing {missing}"] * bool(missing) + [f"twice {repeated}"] * bool(repeated)
    return ", ".join(texts)


def _compare_samples(run: RunDirectory, other: RunDirectory) -> str:
    ours, expected = run.trajectories(), other.trajectories()
    for step in expected:
        if step not in ours:
            return f"step {step} is missing"
        try:
            is_equal = _samples(ours[step]).equals(_samples(expected[step]))
        except (OSError, pa.ArrowException):
            return f"step {step} is damaged"
        if not is_equal:
            return f"step {step}"
    return f"step {max(ours)} is too many" if len(ours) > len(expected) else ""


def _samples(path: Path) -> pa.Table:
    return parquet.read_table(path, columns=_SAMPLED).combine_chunks()


def _compare_metrics(rows: MetricRows, expected: MetricRows) -> str:
    ours = {row["step"]: row for row in rows}
    for row in expected:
        found = ours.get(row["step"], row)
        for name in [*row, *(name for name in found if name not in row)]:
            if not _CLOCKED.search(name) and found.get(name) != row.get(name):
                return f"step {row['step']}: {name} {found.get(name)}, not {row.get(name)}"
    return ""


def _compare_weights(model: Path, other: Path) -> str:
    files, expected = _weight_files(model), _weight_files(other)
    for name in {**expected, **files}:
        if name not in files:
            return f"{name} is missing"
        if name not in expected or files[name].read_bytes() != expected[name].read_bytes():
            return name
    return ""


def _weight_files(model: Path) -> Mapping[str, Path]:
    return {path.name: path for path in sorted(model.glob("*.safetensors"))}
