"""Open a job of any kind, and run the loop of the jobs that learn from rows of data.

Each job adds four things: how its rows are read, which roles it loads, its optimizer step for a
batch of rows, and its evaluation. sft_loop.py is the shortest example. A loss is a mean over the
entire optimizer step, so the split into packs, micro-batches or ranks does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.errors import DoesNotFit, PlimsollError, WorkerDied, WorkerFailed
from plimsoll.records import Prompt, Row, samples_of
from plimsoll.resolve.job import ConfigT
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.health import BAD_STEPS, write_sequences
from plimsoll.run.numbers import first_of, gigabytes
from plimsoll.run.readings import Footprints, Planned, Reading
from plimsoll.train.run_data import (
    LoadRows,
    RunData,
    epoch_metrics,
    first_state,
    load_data,
    repeat_warnings,
)
from plimsoll.train.saving import (
    average_weights,
    check_resumed,
    is_finished,
    record_evaluation,
    restore,
    save_model,
    save_when_due,
)
from plimsoll.train.session import RunSession, open_session, step_metrics
from plimsoll.train.update import OptimizerStep, update
from plimsoll.trainer.schedule import learning_rate

ItemT = TypeVar("ItemT", bound=Row | Prompt)
RowT = TypeVar("RowT", bound=Row)

_SHOWN_ROWS = 64


@dataclass(frozen=True)
class Work(Generic[ConfigT, ItemT]):
    """A job whose data is read and whose processes run."""

    spec: RunSpec[ConfigT]
    session: RunSession
    cluster: Cluster
    data: RunData[ItemT]
    """The rows to learn from, and the held-out rows."""

    @property
    def config(self) -> ConfigT:
        """The config as the user wrote it."""
        return self.spec.config

    def batch(self, position: int, rows: int) -> list[ItemT]:
        """Return the next `rows` rows of the data order, beginning at `position`."""
        return [self.data.train[row] for row in self.data.order.indices(position, rows)]

    def rows_of(self, step: int) -> list[int]:
        """Return the rows that a step learns from, unless steps before it drew more than others."""
        state, rows = self.session.state, self.spec.workload.units
        first = state.data_position + (step - 1 - state.step) * rows
        return [int(row) for row in self.data.order.indices(first, rows)]

    def batches_ahead(self) -> Iterator[Sequence[ItemT]]:
        """Yield all batches to come: held-out rows if the run evaluates, then each step's rows."""
        state, rows = self.session.state, self.spec.workload.units
        if self.spec.run.eval_every is not None:
            yield self.data.eval
        for step in range(self.spec.steps - state.step):
            yield self.batch(state.data_position + step * rows, rows)


@contextmanager
def open_work(
    spec: RunSpec[ConfigT],
    planned: Planned,
    read: Callable[[RunSession], RunData[ItemT]],
    start: Callable[[RunData[ItemT]], Cluster],
) -> Iterator[Work[ConfigT, ItemT]]:
    """Yield the open job: open the run directory, read the data, and start the processes.

    After the block the processes are ended. Raises DoesNotFit if the nodes or cards are smaller
    than planned, unless the run was forced.
    """
    with open_session(spec, planned) as session:
        with session.phase("data"):
            data = read(session)
            session = session.with_rows(len(data.train))
        with session.phase("load"):
            cluster = start(data)
        with closing(cluster), session.checkpoints.finishing(cluster):
            if planned.fits:  # else it was forced
                refuse_smaller_nodes(planned.predicted, cluster.read_memory())
            session.stop_if_asked(session.state.step)
            check_resumed(session, cluster)
            work = Work(session.spec, session, cluster, data)
            with _naming_rows(work):
                yield work


@contextmanager
def _naming_rows(work: Work[ConfigT, ItemT]) -> Iterator[None]:
    """Add the rows of the step to an error that they may have caused: unexpected, or a death."""
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, PlimsollError)
        is_known = is_known and not isinstance(error, WorkerFailed | WorkerDied)
        if not is_known and (step := work.session.step_under_way) > 0:
            rows = first_of([*map(str, work.rows_of(step))], _SHOWN_ROWS)
            error.add_note(f"  Rows of step {step}, counted from 0 in data.train: {rows}")
        raise


def work_on_rows(
    spec: RunSpec[ConfigT], planned: Planned, load_rows: LoadRows[RowT]
) -> AbstractContextManager[Work[ConfigT, RowT]]:
    """Return `open_work` for a job that learns from rows: it starts ranks, and no engines."""
    return open_work(
        spec,
        planned,
        lambda session: load_data(session, load_rows),
        lambda data: start_cluster(spec.cluster, ()),
    )


def leave_out_bad(
    session: RunSession, step: int, rows: Sequence[Row], metrics: dict[str, float]
) -> dict[str, float]:
    """Return a step's metrics; if the gradient was not finite, write down and count the step.

    Raises PlimsollError if there were too many in a row (`run.max_bad_steps`).
    """
    if not metrics["skipped_steps"]:
        return metrics
    path = session.directory.bad_path(step)
    write_sequences(path, step, samples_of(rows))
    figures = [f"the loss ({metrics['loss']:.4g}) or the gradient ({metrics['grad_norm']:.4g})"]
    session.progress.note(session.bad.add(step, figures, path))
    return metrics | {BAD_STEPS: 1.0}


def learn_from_data(
    work: Work[ConfigT, RowT],
    learn: Callable[[Sequence[RowT]], OptimizerStep],
    evaluate: Callable[[], Mapping[str, float]],
) -> None:
    """Run the loop: draw, learn, evaluate, report, save; then write the model.

    `learn` returns the optimizer step for a batch of rows; the loop takes that step. `evaluate`
    returns the metrics of the held-out rows by name; they are reported as `eval/<name>`.
    """
    spec, session, cluster = work.spec, work.session, work.cluster
    role, phase = spec.sender.name, spec.sender.trains
    assert phase is not None, f"{role} only scores"
    restore(session, cluster)
    state, order = first_state(session, work.data), work.data.order
    session.stop_if_asked(state.step)
    for warning in repeat_warnings(order, spec.workload.units):
        session.progress.note(warning)
    while not is_finished(session, state):
        batch = work.batch(state.data_position, spec.workload.units)
        rate = learning_rate(spec.actor.optimizer, state.step, spec.steps)
        step = learn(batch)
        with session.phase(phase, cluster):
            results = update(role, cluster, step, rate)
        state = session.advance(state, len(batch))
        metrics = leave_out_bad(session, state.step, batch, step_metrics(results, rate))
        metrics |= epoch_metrics(order, state.data_position)
        if session.is_due(spec.run.eval_every, state.step):
            with session.phase("eval", cluster), average_weights(session, cluster):
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            state = record_evaluation(session, state, metrics)
        tokens = sum(len(sample.tokens) for sample in samples_of(batch))
        session.report(state.step, metrics, tokens)
        save_when_due(session, cluster, state)
    save_model(session, cluster, state)


def refuse_smaller_nodes(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> None:
    """Raise DoesNotFit if a node or card is smaller than the plan of its processes needs.

    The error lists each such node and card.

    Args:
        predicted: the planned footprints of each process, by phase.
        readings: the reading of each process, with the sizes of its node and card.
    """
    too_small = [*_small_nodes(predicted, readings), *_small_cards(predicted, readings)]
    if too_small:
        raise DoesNotFit(
            "\n  ".join(["the run does not fit the nodes that it was given", *too_small])
            + "\n  Look at `plimsoll plan --suggest` with cluster.hardware and "
            "cluster.host_memory as they are; --force starts a run that its plan refuses."
        )


def _small_nodes(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> Iterator[str]:
    def node_of(name: str) -> str:
        return readings[name].host.node

    for node, group in groupby(sorted(readings, key=node_of), key=node_of):
        names = list(group)
        phases = {phase for name in names for phase in predicted.get(name, {})}
        planned = ([predicted.get(name, {}).get(phase) for name in names] for phase in phases)
        sums = (sum(f.host for f in footprints if f is not None) for footprints in planned)
        need = max(sums, default=0)
        capacity = readings[names[0]].host.capacity
        if need > capacity:
            yield (
                f"node {node} has {gigabytes(capacity)} GB of host memory, and the plan has "
                f"{gigabytes(need)} GB for {', '.join(names)}, which are there"
            )


def _small_cards(
    predicted: Mapping[str, Footprints], readings: Mapping[str, Reading]
) -> Iterator[str]:
    for name, reading in readings.items():
        peaks = predicted.get(name, {}).values()
        need = max((peak.device or 0 for peak in peaks), default=0)
        if reading.card is not None and need > reading.card.capacity:
            yield (
                f"the card of {name}, on node {reading.host.node}, has "
                f"{gigabytes(reading.card.capacity)} GB, and the plan has {gigabytes(need)} GB on "
                f"it"
            )
