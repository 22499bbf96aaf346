"""What a run saves and reads back: checkpoints, the best one, and the final model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shlex import quote

from plimsoll.cluster.protocol import Cluster, ranks_of
from plimsoll.engine.worker import Worker
from plimsoll.run.files import whole_directory
from plimsoll.run.state import RunState, after_evaluation, is_patience_out
from plimsoll.train.how_to_use import trained_text
from plimsoll.train.resuming import changed_settings
from plimsoll.train.session import Session, config_text


def finished(session: Session, state: RunState) -> bool:
    """Whether all steps are done, or evaluations have not got better for too long."""
    run = session.spec.run
    return state.step >= session.spec.steps or is_patience_out(run.best, state)


def evaluated(session: Session, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """The state after an evaluation, by which the best one is known."""
    best = session.spec.run.best
    return state if best is None else after_evaluation(best, state, metrics)


def save_when_due(session: Session, cluster: Cluster, state: RunState) -> None:
    """Write a checkpoint when one is due, of the best evaluation, at the end and after Ctrl-C,
    which then ends the run; remove the oldest. Where none is kept, none is written."""
    asked = session.stop.requested or finished(session, state) or state.best_step == state.step
    if asked or session.due(session.spec.run.save_every, state.step):
        if session.spec.run.keep_checkpoints:
            with session.phase("save", cluster):
                _save(session, cluster, state)
        session.stop_if_asked(state.step)


def _save(session: Session, cluster: Cluster, state: RunState) -> None:
    directory = session.directory
    directory.sync_rows()
    with whole_directory(directory.checkpoint_path(state.step)) as partial:
        for role in session.spec.trained:
            ranks_of(cluster, role).all(Worker.save_checkpoint, role, (partial / role).absolute())
        state.save(partial / "state.json")
    _prune(session, state)


def _prune(session: Session, state: RunState) -> None:
    session.directory.prune_checkpoints(session.spec.run.keep_checkpoints, state.best_step)


def restore(session: Session, cluster: Cluster) -> None:
    """Read the checkpoint that the run resumes from."""
    if session.resumed is None:
        return
    with session.phase("load", cluster):
        for role in session.spec.trained:
            ranks_of(cluster, role).all(
                Worker.load_checkpoint, role, (session.resumed / role).absolute()
            )
    session.progress.note(f"resumed after step {session.state.step} from {session.resumed}")
    _keep_settings(session)
    _prune(session, session.state)  # killed in between, it has one more than it keeps
    if session.spec.trained and session.state.step >= session.spec.steps:
        key = "run.steps" if session.spec.run.epochs is None else "run.epochs"
        rest = "only the model is written" if session.spec.run.save_model else "nothing is done"
        session.progress.note(f"no step is left of {session.spec.steps} ({key}): {rest}")


def _keep_settings(session: Session) -> None:
    """Of the run that goes on, now that its checkpoint takes them: config.yaml is of what the
    checkpoint holds."""
    settings, file = config_text(session.spec), session.directory.config_path
    before = file.read_text(encoding="utf-8") if file.is_file() else settings
    if changes := changed_settings(before, session.spec.config):
        session.progress.note(f"with other settings than before: {', '.join(changes)}")
    session.directory.write_config(settings, session.template)


@contextmanager
def averaged(session: Session, cluster: Cluster) -> Iterator[None]:
    """Within: the actor's weights are their moving average, where one is kept."""
    if session.spec.actor.ema is None:
        yield
        return
    cluster.all(Worker.swap_average, "actor")
    yield
    cluster.all(Worker.swap_average, "actor")


def save_model(session: Session, cluster: Cluster, state: RunState) -> None:
    """Write the actor as the run's final model, which ends the run: of the best evaluation or of
    the last step, as `run.best` says; its moving average, where one is kept. Where
    `run.save_model` is false, none is written."""
    if state.step < session.spec.steps:
        count = state.evaluations_since_best
        worse = "1 evaluation was" if count == 1 else f"{count:,} evaluations in a row were"
        session.progress.note(
            f"stopped early, after step {state.step}: {worse} not better (run.best.patience)"
        )
    if not session.spec.run.save_model:
        session.progress.note(_without_model(session))
        return
    with session.phase("save", cluster):
        _go_back_to_best(session, cluster, state)
        with averaged(session, cluster):
            path = session.directory.model_path.absolute()
            cluster.all(Worker.save_model, "actor", path, session.template)
    directory = session.directory
    session.progress.note(trained_text(session.spec, directory.path, directory.model_path))


def _without_model(session: Session) -> str:
    """What a run is told at its end that writes no model."""
    latest = session.directory.latest_checkpoint()
    told = "no model is written (run.save_model: false)"
    if latest is None:
        return f"{told}, and no checkpoint (run.keep_checkpoints: 0)"
    export = f"plimsoll export {quote(str(latest[1]))} --to DIRECTORY"
    return f"{told}; of the checkpoint `{export}` writes one"


def _go_back_to_best(session: Session, cluster: Cluster, state: RunState) -> None:
    best = session.spec.run.best
    if best is None or best.final_model == "last" or state.best is None:
        return
    session.progress.note(
        f"the model is that of step {state.best_step}: {best.metric} {state.best:.6g}"
    )
    if state.best_step < state.step:
        directory = session.directory.checkpoint_path(state.best_step) / "actor"
        cluster.all(Worker.load_checkpoint, "actor", directory.absolute())
