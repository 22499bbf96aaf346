"""Save and restore a run: its checkpoints, the best one, and the final model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shlex import quote

from plimsoll.cluster.protocol import Cluster, ranks_of
from plimsoll.engine.worker import Worker
from plimsoll.machine.faults import fault_point
from plimsoll.run.files import whole_directory
from plimsoll.run.state import RunState, after_evaluation, is_patience_out
from plimsoll.train.how_to_use import trained_text
from plimsoll.train.resuming import changed_settings
from plimsoll.train.session import RunSession, config_text


def is_finished(session: RunSession, state: RunState) -> bool:
    """Return whether all steps are done, or `run.best.patience` has run out."""
    run = session.spec.run
    return state.step >= session.spec.steps or is_patience_out(run.best, state)


def record_evaluation(
    session: RunSession, state: RunState, metrics: Mapping[str, float]
) -> RunState:
    """Return the state with an evaluation's `metrics` compared with the best value so far.

    The result is `state` itself without `run.best`.
    """
    best = session.spec.run.best
    return state if best is None else after_evaluation(best, state, metrics)


def save_when_due(session: RunSession, cluster: Cluster, state: RunState) -> None:
    """Write a checkpoint if one is due, and remove older checkpoints (see `save_checkpoint`).

    A checkpoint is due every `run.save_every` steps, after the best evaluation, at the end, and
    after Ctrl-C. With `run.keep_checkpoints: 0` none is written. After Ctrl-C, raise Interrupted to
    end the run if steps are left.
    """
    always = session.stop.requested or is_finished(session, state) or state.best_step == state.step
    if always or session.is_due(session.spec.run.save_every, state.step):
        if session.spec.run.keep_checkpoints:
            with session.phase("save", cluster):
                save_checkpoint(session, cluster, state)
        session.stop_if_asked(state.step)


def save_checkpoint(session: RunSession, cluster: Cluster, state: RunState) -> None:
    """Write a checkpoint of the run's state and its trained roles, if it trains any.

    Then keep only the last `run.keep_checkpoints` checkpoints and that of the best evaluation.
    """
    directory = session.directory
    directory.sync_rows()
    saved = directory.checkpoint_path(state.step)
    fault_point("checkpoint.begin", state.step)
    with whole_directory(saved) as partial:
        for role in session.spec.trained:
            ranks_of(cluster, role).all(Worker.save_checkpoint, role, (partial / role).absolute())
        state.save(partial / "state.json")
        fault_point("checkpoint.rename", state.step, path=partial)
    fault_point("checkpoint.done", state.step, path=saved)
    directory.prune_checkpoints(session.spec.run.keep_checkpoints, state.best_step)


def restore(session: RunSession, cluster: Cluster) -> None:
    """Load the checkpoint that the run resumes from; do nothing in a new run."""
    if session.resumed is None:
        return
    with session.phase("load", cluster):
        for role in session.spec.trained:
            ranks_of(cluster, role).all(
                Worker.load_checkpoint, role, (session.resumed / role).absolute()
            )
    session.progress.note(f"resumed after step {session.state.step} from {session.resumed}")
    _keep_settings(session)
    # A run that was killed while it saved may have a checkpoint too many.
    session.directory.prune_checkpoints(session.spec.run.keep_checkpoints, session.state.best_step)
    if session.spec.trained and session.state.step >= session.spec.steps:
        key = "run.steps" if session.spec.run.epochs is None else "run.epochs"
        rest = "only the model is written" if session.spec.run.save_model else "nothing is done"
        session.progress.note(f"no step is left of {session.spec.steps} ({key}): {rest}")


def _keep_settings(session: RunSession) -> None:
    """Write the settings of a resumed run to config.yaml, now that the checkpoint could be loaded.

    Settings that differ from before are reported.
    """
    settings, file = config_text(session.spec), session.directory.config_path
    saved = file.read_text(encoding="utf-8") if file.is_file() else settings
    if changes := changed_settings(saved, session.spec.written):
        session.progress.note(f"with other settings than before: {', '.join(changes)}")
    session.directory.write_config(settings, session.template)


@contextmanager
def average_weights(session: RunSession, cluster: Cluster) -> Iterator[None]:
    """During the block, use the moving average of the actor's weights, if the run keeps one."""
    if session.spec.actor.ema is None:
        yield
        return
    cluster.all(Worker.swap_average, "actor")
    yield
    cluster.all(Worker.swap_average, "actor")


def save_model(session: RunSession, cluster: Cluster, state: RunState) -> None:
    """Write the actor as the run's final model.

    `run.best` decides whether it has the weights of the best evaluation or of the last step. If the
    run keeps a moving average of the weights, the average is written. With `run.save_model: false`
    no model is written.
    """
    if state.step < session.spec.steps:
        count = state.evaluations_since_best
        worse = "1 evaluation was" if count == 1 else f"{count:,} evaluations in a row were"
        session.progress.note(
            f"stopped early, after step {state.step}: {worse} not better (run.best.patience)"
        )
    if not session.spec.run.save_model:
        session.progress.note(_no_model_text(session))
        return
    with session.phase("save", cluster):
        _go_back_to_best(session, cluster, state)
        with average_weights(session, cluster):
            path = session.directory.model_path.absolute()
            cluster.all(Worker.save_model, "actor", path, session.template)
    directory = session.directory
    session.progress.note(trained_text(session.spec, directory.path, directory.model_path))


def _no_model_text(session: RunSession) -> str:
    latest = session.directory.latest_checkpoint()
    text = "no model is written (run.save_model: false)"
    if latest is None:
        return f"{text}, and no checkpoint (run.keep_checkpoints: 0)"
    export = f"plimsoll export {quote(str(latest[1]))} --to DIRECTORY"
    return f"{text}; of the checkpoint `{export}` writes one"


def _go_back_to_best(session: RunSession, cluster: Cluster, state: RunState) -> None:
    best = session.spec.run.best
    if best is None or best.final_model == "last" or state.best is None:
        return
    session.progress.note(
        f"the model is that of step {state.best_step}: {best.metric} {state.best:.6g}"
    )
    if state.best_step < state.step:
        directory = session.directory.checkpoint_path(state.best_step) / "actor"
        cluster.all(Worker.load_checkpoint, "actor", directory.absolute())
