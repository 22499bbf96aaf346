"""Save and restore a run: its checkpoints, the best one, and the final model.

A resumed run's settings and rows are compared with those before. Changed settings are reported. A
checkpoint holds a fingerprint of the rows of each source. Rows that were added at the end or
removed are reported; rows that were replaced are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from shlex import quote
from typing import Any

import xxhash

from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.base import Settings
from plimsoll.config.data import EVALUATED, SourceConfig
from plimsoll.config.keys import dump_config
from plimsoll.config.load import leaves
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree
from plimsoll.data.cache import token_versions
from plimsoll.data.stored import fingerprint
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt, Row
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import leave_out_damaged
from plimsoll.run.files import directory_bytes
from plimsoll.run.numbers import gigabytes_text, plural
from plimsoll.run.state import RunState, SourceState, after_evaluation, is_patience_out
from plimsoll.train.how_to_use import trained_text
from plimsoll.train.session import RunSession, config_text
from plimsoll.trainer.worker import Worker

_READ_WITHOUT_WORD = 2**33
"""Bytes of the largest checkpoint whose files are read without a message."""


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


def check_resumed(session: RunSession, cluster: Cluster) -> None:
    """Have the ranks compare the checkpoint that the run resumes from with its manifest.

    Raises CheckpointDamaged if it is damaged and there is an earlier one, else ConfigError.
    """
    if session.resumed is None:
        return
    if (size := directory_bytes(session.resumed)) > _READ_WITHOUT_WORD:
        session.progress.note(
            f"ranks check {session.resumed} against its manifest: {gigabytes_text(size)}"
        )
    with session.phase("load", cluster):
        if damage := session.checkpoints.find_damage(cluster, session.resumed):
            raise leave_out_damaged(session.directory, session.state.step, damage)


def restore(session: RunSession, cluster: Cluster) -> None:
    """Load the checkpoint that the run resumes from; do nothing in a new run."""
    if session.resumed is None:
        return
    with session.phase("load", cluster):
        for name in session.spec.trained:
            group = group_of(cluster, session.spec.roles[name])
            group.all(Worker.load_checkpoint, name, (session.resumed / name).absolute())
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
    cluster.all(Worker.swap_average, session.spec.sender.name)
    yield
    cluster.all(Worker.swap_average, session.spec.sender.name)


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
            path, name = session.directory.model_path.absolute(), session.spec.sender.name
            added, *_ = cluster.all(Worker.save_model, name, path, session.template)
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
        damage = "it is missing"
        if path.is_dir():
            damage = session.checkpoints.find_damage(cluster, path)
        if damage:
            raise ConfigError(
                f"{path}, the checkpoint of the best evaluation, cannot become the final model: "
                f"{damage}. Everything is saved up to step {state.step}. Put the file back from a "
                f"copy, or take the last step's model with --run.best.final_model last; then run "
                f"the same command with --run.resume auto."
            )
        name = session.spec.sender.name
        cluster.all(Worker.load_checkpoint, name, (path / name).absolute())


Sources = Mapping[str, SourceState]
"""The state of each source, by its key in the config."""
Items = Mapping[str, Sequence[Row | Prompt]]
"""The items of each source, by its key in the config."""

_RESUME_SETTINGS = ("run.resume", "run.edited_rows")
_NOT_OF_ROWS = ("cache", "processes")
"""Settings under `data` that change no rows."""
_WITHOUT_ROWS = {"weight", *EVALUATED}
"""Settings of a source that do not change its rows."""
_MISSING = object()


def sources_of(spec: RunSpec[Any], items: Items) -> Sources:
    """Return the state of each source: hash of its settings, number and fingerprint of its rows."""
    return {
        key: SourceState(_settings_hash(spec, source), len(items[key]), fingerprint(items[key]))
        for key, source in spec.data.sources().items()
    }


def check_rows(session: RunSession, items: Items, sources: Sources) -> None:
    """Raise ConfigError if rows were edited since the checkpoint; it names their sources.

    With `run.edited_rows: accept` the edited sources are only reported. A source whose settings
    for choosing and tokenizing rows have changed is not compared.
    """
    before, spec = session.state.sources or {}, session.spec
    edited = [
        f"{key} ({spec.data.sources()[key].path})"
        for key, now in sources.items()
        if key in before and before[key].asked == now.asked
        if not _begins_with(before[key], now, items[key])
    ]
    if not edited:
        return
    what = (
        f"the rows of {' and of '.join(edited)} are not those that the run had until step "
        f"{session.state.step}"
    )
    if spec.run.edited_rows == "accept":
        session.progress.note(f"{what}: it goes on with them as they are now")
        return
    if changes := version_changes(session.state.versions):
        what = f"{what}, and since then changed {', '.join(changes)}"
    raise ConfigError(
        f"{what}: some have other content or another order, though the settings are the same, so "
        f"the run would not be the one that it was. Put the rows back as they were, or the "
        f"tokenizer, template and libraries that made their tokens; --run.edited_rows accept goes "
        f"on with them as they are now; another run.directory begins anew."
    )


def version_changes(before: Mapping[str, str]) -> list[str]:
    """Return each library whose version is not the one of before, as `name: old -> new`."""
    now = token_versions()
    return [f"{n}: {old} -> {now[n]}" for n, old in before.items() if now.get(n, old) != old]


def row_count_changes(state: RunState, learned_from: int, sources: Sources) -> Iterator[str]:
    """Yield a message for each source whose number of rows differs from the checkpoint's.

    `learned_from` is the number of rows to learn from, of all sources together. Older checkpoints
    hold only this number.
    """
    whole = "data.train"
    if state.sources is None:
        before, now = {whole: state.data_rows}, {whole: learned_from}
    else:
        before = {key: source.rows for key, source in state.sources.items()}
        now = {key: source.rows for key, source in sources.items()}
    for key in [key for key in before if now.get(key, before[key]) != before[key]]:
        follows = (
            "evaluations are of other rows than before"
            if key.startswith("data.eval")
            else f"the order from here on is that of {plural(now[key], 'row')}, and some of this "
            "epoch may come twice or not at all"
        )
        usable = plural(before[key], "usable row")
        yield f"{key} had {usable}, and has {now[key]:,} now: {follows}"


def _begins_with(before: SourceState, now: SourceState, items: Sequence[Row | Prompt]) -> bool:
    """Return whether the items begin with the items from before; assume so if there are fewer."""
    if now.rows <= before.rows:
        return now.rows < before.rows or now.content == before.content
    return fingerprint(islice(items, before.rows)) == before.content


def _settings_hash(spec: RunSpec[Any], source: SourceConfig) -> str:
    """Return a hash of the settings that choose a source's rows and tokenize them.

    Settings with their default are left out, so a key that a later version adds changes no hash.
    """
    model, other_data = spec.actor.model, {"train", "eval", "shuffle", "date", *_NOT_OF_ROWS}
    settings: dict[str, object] = {
        "source": source.model_dump(exclude=_WITHOUT_ROWS, exclude_defaults=True),
        "data": spec.data.model_dump(exclude=other_data, exclude_defaults=True),
        "model": [model.path, model.trust_remote_code],
        "learned": None,
    } | dict(spec.job.rows(spec.config))
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())


def changed_settings(before: str, now: Settings) -> list[str]:
    """Return the differences between two resolved configs, each as `key: old -> new`.

    `before` is YAML as `dump_config` writes it. The result is in the order of the new config's
    keys. A key may be missing in `before` because an older version wrote it; then the key counts
    only if its value is not the default.
    """
    old, new = (
        _by_key(read_tree(text, "config.yaml").values) for text in (before, dump_config(now))
    )
    # An empty section that the old config has is one of defaults; one that it lacks is news.
    changed = _by_key(now.model_dump(exclude_defaults=True)).items()
    relevant = [
        *old,
        *(key for key, value in changed if value or not any(o.startswith(f"{key}.") for o in old)),
    ]
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {_value_text(old, key)} -> {_value_text(new, key)}"
        for key in keys
        if key not in _RESUME_SETTINGS and old.get(key, _MISSING) != new.get(key, _MISSING)
        if any(key == set_key or key.startswith(f"{set_key}.") for set_key in relevant)
    ]


def _by_key(tree: Mapping[str, Any]) -> dict[str, object]:
    return {".".join(map(str, path)): value for path, value in leaves(tree).items()}


def _value_text(leaves: Mapping[str, object], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not given"
