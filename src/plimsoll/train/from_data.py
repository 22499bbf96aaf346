"""What every job has that learns from a fixed data set: the way to the loop, and the loop.

A job adds its rows, what it loads, one optimizer step on a batch of rows, and its evaluation; see
sft.py for the shortest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.data.order import MixedOrder
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.worker import StepResult
from plimsoll.records import Row, samples_of
from plimsoll.run.planned import Planned
from plimsoll.spec.job import ConfigT
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.resuming import Sources
from plimsoll.train.run_data import LoadRows, epoch_metrics, first_state, load_data, repeats
from plimsoll.train.saving import (
    averaged,
    evaluated,
    finished,
    restore,
    save_model,
    save_when_due,
)
from plimsoll.train.session import Session, open_session, step_metrics

RowT = TypeVar("RowT", bound=Row)


@dataclass(frozen=True)
class Work(Generic[ConfigT, RowT]):
    """A job at work. train: the rows to learn from, drawn in this order. eval: those held out.
    sources: what each source of them gave."""

    spec: RunSpec[ConfigT]
    session: Session
    cluster: Cluster
    train: tuple[RowT, ...]
    eval: tuple[RowT, ...]
    order: MixedOrder
    sources: Sources

    @property
    def config(self) -> ConfigT:
        """As it was written."""
        return self.spec.config

    def batch(self, position: int, rows: int) -> list[RowT]:
        """The rows from a position of the order on."""
        return [self.train[row] for row in self.order.indices(position, rows)]

    def batches_ahead(self) -> Iterator[Sequence[RowT]]:
        """The held-out rows, where the run evaluates, and those of each step that is still to be
        done."""
        state, rows = self.session.state, self.spec.workload.units
        if self.spec.run.eval_every is not None:
            yield self.eval
        for step in range(self.spec.run.steps - state.step):
            yield self.batch(state.data_position + step * rows, rows)


@contextmanager
def open_work(
    spec: RunSpec[ConfigT], planned: Planned, load_rows: LoadRows[RowT]
) -> Iterator[Work[ConfigT, RowT]]:
    """Open the run directory, read the data, start the ranks; ends them at the end."""
    with open_session(spec, planned) as session:
        with session.phase("data"):
            data = load_data(session, load_rows)
        with session.phase("load"):
            cluster = start_cluster(spec.cluster, ())
        with closing(cluster):
            session.check_nodes(cluster)
            session.stop_if_asked(session.state.step)
            yield Work(spec, session, cluster, data.train, data.eval, data.order, data.sources)


def learn_from_data(
    work: Work[ConfigT, RowT],
    learn: Callable[[Sequence[RowT], float], Sequence[StepResult]],
    evaluate: Callable[[], Mapping[str, float]],
) -> None:
    """The loop: draw, learn, evaluate, report, save; then write the model.

    learn: one optimizer step on the rows at a learning rate. evaluate: what is seen of the held-out
    rows, by name; written as `eval/<name>`.
    """
    spec, session, cluster = work.spec, work.session, work.cluster
    restore(session, cluster)
    state = first_state(session, work.order, work.sources)
    session.stop_if_asked(state.step)
    for repeated in repeats(work.order, spec.workload.units):
        session.progress.note(repeated)
    while not finished(session, state):
        batch = work.batch(state.data_position, spec.workload.units)
        rate = learning_rate(spec.actor.optimizer, state.step, spec.run.steps)
        results = learn(batch, rate)
        state = session.advance(state, len(batch))
        metrics = step_metrics(results, rate) | epoch_metrics(work.order, state.data_position)
        if session.due(spec.run.eval_every, state.step):
            with session.phase("eval", cluster), averaged(session, cluster):
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            state = evaluated(session, state, metrics)
        tokens = sum(len(sample.tokens) for sample in samples_of(batch))
        session.report(state.step, metrics, tokens)
        save_when_due(session, cluster, state)
    save_model(session, cluster, state)
