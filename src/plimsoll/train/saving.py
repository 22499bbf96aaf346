"""Save and restore a run: its checkpoints, the best one, and the final model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shlex import quote

from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.errors import ConfigError
from plimsoll.run.manifest import find_damage
from plimsoll.run.state import RunState, after_evaluation, is_patience_out
from plimsoll.train.how_to_use import trained_text
from plimsoll.train.resuming import changed_settings
from plimsoll.train.session import RunSession, config_text
from plimsoll.trainer.worker import Worker


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
    """Write a checkpoint if one is due, and remove older checkpoints.

    A checkpoint is due every `run.save_every` steps, after the best evaluation, at the end, and
    after Ctrl-C. With `run.keep_checkpoints: 0` none is written. With `run.save_in_background` the
    ranks write it while they train on; a later call finishes it. The last one is written at once.
    After Ctrl-C, raise Interrupted to end the run if steps are left.
    """
    run, checkpoints = session.spec.run, session.checkpoints
    checkpoints.finish(cluster, wait=False)
    is_last = session.stop.requested or is_finished(session, state)
    is_best = state.best_step == state.step
    if is_last or is_best or session.is_due(run.save_every, state.step):
        if run.keep_checkpoints:
            in_background = run.save_in_background and not is_last
            with session.phase("save", cluster):
                (checkpoints.begin if in_background else checkpoints.write)(cluster, state)
        if session.stop.requested:  # while the ranks copied
            checkpoints.finish(cluster)
        session.stop_if_asked(state.step)


def restore(session: RunSession, cluster: Cluster) -> None:
    """Load the checkpoint that the run resumes from; do nothing in a new run."""
    if session.resumed is None:
        return
    with session.phase("load", cluster):
        for role in session.spec.trained:
            group_of(cluster, role).all(
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
            added, *_ = cluster.all(Worker.save_model, "actor", path, session.template)
    directory = session.directory
    if added is not None:
        session.progress.note(
            f"responses of the model end with {added}, too, with which the chat template ends "
            f"turns: generation_config.json has it beside the ends that it had"
        )
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
        path = session.directory.checkpoint_path(state.best_step)
        if damage := find_damage(path) if path.is_dir() else "it is missing":
            raise ConfigError(
                f"{path}, the checkpoint of the best evaluation, cannot become the final model: "
                f"{damage}. Everything is saved up to step {state.step}. Put the file back from a "
                f"copy, or take the last step's model with --run.best.final_model last; then run "
                f"the same command with --run.resume auto."
            )
        cluster.all(Worker.load_checkpoint, "actor", (path / "actor").absolute())
