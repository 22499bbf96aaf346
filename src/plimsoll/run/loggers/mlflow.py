"""Logger to MLflow; its environment variable MLFLOW_TRACKING_URI (the address) applies."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from plimsoll.run.loggers.open import About, failing, table_of
from plimsoll.run.responses import SampledResponse

_FAILURES = (MlflowException, OSError)
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1000, 100, 6000
"""Limits above which MLflow refuses a request (mlflow/utils/validation.py)."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowLogger:
    """A run of MLflow.

    MLflow's params cannot change, so they are the settings when the run began. The artifact
    config.yaml has the current settings.
    """

    name = "MLflow"
    has_tables = True

    def __init__(self, about: About) -> None:
        with failing(*_FAILURES):
            self._client: Any = MlflowClient()
            self.identity = about.identity or self._begin(about)
            self._client.update_run(self.identity, status="RUNNING")
            self._client.log_dict(self.identity, dict(about.settings), "config.yaml")

    def _begin(self, about: About) -> str:
        experiment = self._client.get_experiment_by_name(about.project)
        number = (
            self._client.create_experiment(about.project)
            if experiment is None
            else experiment.experiment_id
        )
        identity: str = self._client.create_run(number, run_name=about.name).info.run_id
        params = [Param(key, value[:_LONGEST_PARAM]) for key, value in _flat("", about.settings)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(identity, params=params[start : start + _PARAMS_AT_ONCE])
        return identity

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        now = int(time.time() * 1000)
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in values.items()
        ]
        with failing(*_FAILURES):
            for start in range(0, len(metrics), _METRICS_AT_ONCE):
                batch = metrics[start : start + _METRICS_AT_ONCE]
                self._client.log_batch(self.identity, metrics=batch)

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        """Send a table of responses as a new file per step.

        MLflow would send all rows of a growing table again at each step.
        """
        columns, data = table_of(step, rows)
        content = {name: [row[i] for row in data] for i, name in enumerate(columns)}
        with failing(*_FAILURES):
            self._client.log_table(self.identity, content, f"responses/step-{step:06d}.json")

    def close(self, *, failed: bool) -> None:
        """Mark the run as ended; a resumed run is marked as running again."""
        with failing(*_FAILURES):
            self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text of the value) for each setting."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{name}.", value)
        else:
            yield _NOT_IN_NAMES.sub("_", name), str(value)
