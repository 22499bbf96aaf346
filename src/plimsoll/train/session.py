"""Give every job's loop its run directory, clock, display and metrics, and handle Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import xxhash

from plimsoll import __version__
from plimsoll.cluster.protocol import Cluster, on_all_ranks
from plimsoll.config.keys import dump_config
from plimsoll.config.yaml_tree import read_tree, value_at
from plimsoll.data.fields import BadRow
from plimsoll.data.template import given_template
from plimsoll.errors import (
    ConfigError,
    FunctionFailed,
    Interrupted,
    NodesMissing,
    PlimsollError,
    WorkerDied,
)
from plimsoll.machine.faults import fault_point
from plimsoll.machine.incident import OutOfMemory
from plimsoll.machine.processes import read_host, reset_process_peak
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory, TrajectoryPruner, open_run
from plimsoll.run.displays import BESIDE_STEPS, StepReport
from plimsoll.run.ending import RESUME, StopRequest, recording_end
from plimsoll.run.files import explaining_errors, write_whole
from plimsoll.run.health import BAD_STEPS, BadSteps, HealthWatch
from plimsoll.run.journal import Journal
from plimsoll.run.json_lines import read_rows, write_rows
from plimsoll.run.ledger import LeakWatch, Ledger, busy_share, find_full_node, memory_use
from plimsoll.run.loggers import open_loggers
from plimsoll.run.mirror import Mirror
from plimsoll.run.numbers import mean, plural
from plimsoll.run.output import RunLog, console_to, tell
from plimsoll.run.phases import (
    CurrentPhase,
    PhaseClock,
    TimedPhase,
    tell_of_run,
    write_current_phase,
)
from plimsoll.run.progress import MetricsSink, Progress
from plimsoll.run.readings import Planned, Reading
from plimsoll.run.state import RunState
from plimsoll.train.checkpoints import Checkpoints
from plimsoll.train.notify import notifying
from plimsoll.train.tokenizers import check_templates, check_tokenizers
from plimsoll.trainer.worker import UpdateResult, Worker

_RELEASE_HEAP_BEFORE = ("eval", "save")
"""Phases before which the heap's free blocks are released. The heap keeps free blocks for a second.
These phases may be shorter, and their memory reading would include blocks that training has freed.
"""

_NEW_RUN = RunState(
    step=0, data_position=0, data_rows=0, weight_version=0, kl_coefficient=0.0, seconds=0.0
)


@dataclass(frozen=True)
class RunSession:
    """An open run: its settings, directory and state, and recorders of time, memory and metrics."""

    spec: RunSpec[Any]
    directory: RunDirectory
    clock: PhaseClock
    planned: Planned
    """The plan of the run's memory."""
    ledger: Ledger
    leaks: LeakWatch
    progress: Progress
    sink: MetricsSink
    stop: StopRequest
    journal: Journal
    """What was sampled and not yet learned from."""
    checkpoints: Checkpoints
    pruner: TrajectoryPruner
    bad: BadSteps
    state: RunState
    """The state that this part of the run starts from."""
    template: str | None
    """The Jinja template that the config sets, None for the tokenizer's own, or `none`."""
    resumed: Path | None
    """The checkpoint that the run resumes from; None in a new run."""
    started: float
    """The time at which this part of the run started, in seconds of the monotonic clock."""

    def with_rows(self, rows: int) -> RunSession:
        """Return the session with the number of rows to learn from.

        If `run.epochs` sets the length of the run, this number decides the number of steps. Raises
        ConfigError for a setting that does not agree with the number of steps.
        """
        spec = replace(self.spec, rows=rows)
        if spec.run.epochs is not None:
            check_agreement(spec)
            self.progress.steps = spec.steps
            steps = plural(spec.steps, "step")
            self.progress.note(f"run.epochs: {spec.run.epochs:g} of {plural(rows, 'row')}: {steps}")
        return replace(self, spec=spec)

    def note_bad_rows(self, rows: Sequence[BadRow]) -> None:
        """Write skipped rows to a file in the run directory, and report their number."""
        if rows:
            write_rows(self.directory.bad_rows_path, [asdict(row) for row in rows])
            self.progress.note(
                f"skipped {plural(len(rows), 'bad row')}, listed in {self.directory.bad_rows_path}"
            )

    @contextmanager
    def phase(self, name: TimedPhase, cluster: Cluster | None = None) -> Iterator[None]:
        """Measure the time of the block, and the memory of every process at its end.

        Without a cluster only the memory of this process is read. If memory runs out, a process
        dies or a user's function fails in the block, the name of the phase is added to the error.
        """
        if name != "save":
            self._write_saved()
        # The first sync belongs to loading: before the first step a stop loses nothing.
        self.stop.at_once = name in ("data", "load") or (name == "sync" and self.stop.at_once)
        self.progress.enter(name)
        now = CurrentPhase(self.step_under_way, self.progress.steps, name)
        write_current_phase(self.directory.now_path, now)
        with self.clock.phase(name), _add_phase_to_errors(name, self.step_under_way):
            fault_point(f"controller.{name}", self.step_under_way)
            if cluster is not None and name in _RELEASE_HEAP_BEFORE:
                on_all_ranks(cluster, Worker.release_heap)
            start = time.perf_counter()
            yield
            seconds = time.perf_counter() - start
            self._note_shortages(name, cluster)
            readings = self._readings(cluster)
            self._watch_hosts(readings)
            self.ledger.add(name, readings, seconds)

    def _watch_hosts(self, readings: Mapping[str, Reading]) -> None:
        """Ask the run to stop after the step if a node has hardly any memory left."""
        hosts = [reading.host for reading in readings.values()]
        full_node = find_full_node(hosts, self.spec.cluster.least_free_memory)
        if full_node is not None and self.stop.full_node is None:
            self.stop.full_node, self.stop.requested = full_node, True
            self.progress.note(f"stopping after this step: {full_node}")

    def _note_shortages(self, phase: TimedPhase, cluster: Cluster | None) -> None:
        """Report where memory ran out in a phase that went on with smaller micro-batches."""
        if cluster is None:
            return
        groups = (cluster, *cluster.own_groups.values())
        for halving in (h for group in groups for h in group.shortages.take_unreported()):
            error, path = halving.error.in_phase(phase), self.directory.shortage_path
            text = str(error)
            if self.planned.explain is not None:
                text += f"\n{self.planned.explain(error.incident, phase)}"
            write_whole(path, f"{text}\n")
            self.progress.note(
                f"{str(error).splitlines()[0]} at a pack of {halving.before:,} tokens. The "
                f"step was done anew, with the same gradient: from now on the packs of "
                f"{halving.role} have at most {halving.after:,} tokens. Why it ran out: {path}"
            )

    @property
    def step_under_way(self) -> int:
        """The number of the current step, from 1; 0 until an evaluation before training is done."""
        return self.ledger.step + 1

    def _readings(self, cluster: Cluster | None) -> dict[str, Reading]:
        if cluster is not None:
            return cluster.read_memory()
        in_process = self.spec.cluster.where == "local"
        return {"local" if in_process else "controller": Reading(read_host())}

    def _write_saved(self) -> None:
        """Write the memory readings of a checkpoint, under the step that was reported last."""
        if "save" in self.ledger.phases():
            self.sink.write_ledger(self.ledger.take(self.ledger.step))

    def report(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Write a step's metrics and memory readings, and start the clock of the next step.

        `tokens` is the number of tokens that the step has processed.
        """
        self.bad.in_a_row = self.bad.in_a_row if BAD_STEPS in metrics else 0
        rows = self.ledger.take(step)
        self.sink.write_ledger(rows)
        seconds = self.clock.seconds()
        with explaining_errors(self.directory.metrics_path):
            fault_point("metrics.write", step)
        self.sink.write(
            StepReport(
                step,
                metrics,
                tokens,
                seconds,
                memory_use(rows),
                self.planned.tokens_at_peak,
                busy_share(row for row in rows if row.phase not in BESIDE_STEPS),
            )
        )
        fault_point("metrics.done", step, path=self.directory.metrics_path)
        for leak in self.leaks.add(rows):
            self.sink.write_leak(step, leak)
        self.clock.reset()

    def write_rest(self) -> None:
        """Write the memory readings since the last report: of a checkpoint, or of an unended step.

        Nothing is written by a resumed run without a step left, which only writes its model: the
        ledger has these rows already.
        """
        saved = "save" in self.ledger.phases()
        if saved and self.ledger.step == self.state.step:
            return
        step = self.ledger.step if saved else self.step_under_way
        self.sink.write_ledger(self.ledger.take(step))
        self.sink.ledger.finish()

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether work is due at `step` that is done every `every` steps and at the last.

        None: the work is never due.
        """
        return every is not None and (step % every == 0 or step == self.spec.known_steps)

    def advance(self, state: RunState, rows: int) -> RunState:
        """Return the state after one more step that drew `rows` rows from the data."""
        return replace(
            state,
            step=state.step + 1,
            data_position=state.data_position + rows,
            seconds=self.state.seconds + time.monotonic() - self.started,
        )

    def stop_if_asked(self, done: int) -> None:
        """Raise Interrupted if Ctrl-C was pressed and steps are left.

        Raise another PlimsollError if a node's memory was nearly used up.
        `done` is the number of steps done. If the run keeps checkpoints, they must be saved.
        """
        steps = self.spec.known_steps
        if self.stop.requested and (steps is None or done < steps):
            raise self._interruption(done)

    @contextmanager
    def stop_at_once_while_loading(self) -> Iterator[None]:
        """Turn a KeyboardInterrupt before the first step into Interrupted.

        Before the first step Ctrl-C stops the run at once, for nothing is lost.
        """
        self.stop.at_once = True
        try:
            yield
        except KeyboardInterrupt as error:
            if not self.stop.at_once:
                raise
            raise self._interruption(self.state.step) from error

    def _interruption(self, done: int) -> PlimsollError:
        if self.stop.full_node is not None:
            when = f"after step {done}" if done else "before the first step"
            return PlimsollError(
                f"stopped {when}, before the kernel kills a process: "
                f"{self.stop.full_node}. Give the node more memory, or let the run hold less of it "
                "(`plimsoll plan CONFIG --suggest`), or end other processes"
            )
        steps = self.spec.known_steps
        total = "" if steps is None else f" of {steps}"
        if done == 0:
            return Interrupted(
                f"stopped before the first step{total}, as asked; there is nothing to save "
                f"yet. To begin again: {RESUME}"
            )
        if not self.spec.run.keep_checkpoints and done > self.state.step:
            return Interrupted(
                f"stopped after step {done}{total}, as asked; {self._describe_loss(done)}: {RESUME}"
            )
        return Interrupted(
            f"stopped after step {done}{total}, as asked; everything is saved. To go on: {RESUME}"
        )

    def _describe_loss(self, done: int) -> str:
        first = self.state.step
        lost = plural(done - first, "step")
        loss = (
            f"nothing is saved (run.keep_checkpoints: 0), so what was learned in {lost} is lost. "
        )
        if self.resumed is None:
            return f"{loss}To begin again"
        return f"{loss}To go on after step {first}, from {self.resumed}"


@contextmanager
def open_session(spec: RunSpec[Any], planned: Planned) -> Iterator[RunSession]:
    """Yield the session: the open run directory, and the recorders of the run.

    After the block everything is closed. Raises ConfigError if roles have different tokenizers.
    """
    run, template = spec.run, given_template(spec.data)
    check_tokenizers(spec.actor.model, spec.roles.values())
    if spec.sampling is not None and template is None:
        check_templates(spec.actor.model, spec.roles.values())
    with ExitStack() as stack:
        log = stack.enter_context(closing(RunLog(RunDirectory(Path(run.directory)).log_path)))
        mirror = None if run.mirror is None else Mirror(run.mirror, partial(_tell_and_log, log))
        fetch = None if mirror is None else mirror.fetch
        directory = stack.enter_context(open_run(run, partial(_tell_and_log, log), fetch))
        tell_of_run(run, spec.cluster, is_open=True)
        fault_point("controller.start")
        if mirror is not None:
            stack.enter_context(mirror.following(directory))
        log.add(_first_line())
        stack.enter_context(recording_end(directory, log))
        latest = directory.latest_checkpoint()
        state = _load_state(*latest) if latest else _NEW_RUN
        spec = _with_date(spec, directory)
        if latest is None:
            directory.write_config(config_text(spec), template)
        if planned.plan is not None:
            write_whole(directory.plan_path, planned.plan)
        stop = stack.enter_context(StopRequest())
        settings = spec.config.model_dump(mode="json")
        first_step = state.step + 1 if latest else 0
        loggers = stack.enter_context(open_loggers(run, directory, settings, first_step))
        progress = stack.enter_context(
            Progress(spec.job.name, spec.known_steps, directory.path, sys.stdout, log.add)
        )
        name = f"{spec.job.name} {directory.path}"
        begin = f"goes on after step {state.step}" if latest else "starts"
        notify = stack.enter_context(notifying(run, name, begin, progress.note))
        stack.enter_context(console_to(log, sys.stdout, sys.stderr))
        if not reset_process_peak():
            progress.note(
                "the system does not let memory peaks start anew (/proc/self/clear_refs): those in "
                "the ledger are of the time since each process began"
            )
        session = RunSession(
            spec=spec,
            directory=directory,
            clock=PhaseClock(),
            planned=planned,
            ledger=Ledger(planned.predicted, state.step - evaluates_first(spec, state)),
            leaks=LeakWatch(),
            progress=progress,
            sink=MetricsSink(
                directory, progress, loggers, _open_health_watch(spec, directory), notify
            ),
            stop=stop,
            journal=Journal(directory.journal_path, lineage_of(spec)),
            checkpoints=Checkpoints(spec, directory, planned.checkpoint_bytes, mirror),
            pruner=TrajectoryPruner(directory, run),
            bad=BadSteps(run.max_bad_steps),
            state=state,
            template=template,
            resumed=latest[1] if latest else None,
            started=time.monotonic(),
        )
        stack.callback(session.write_rest)
        if not run.keep_checkpoints:
            progress.note("run.keep_checkpoints: 0: a run that is stopped or fails saves nothing")
        with session.stop_at_once_while_loading():
            yield session


def _with_date(spec: RunSpec[Any], directory: RunDirectory) -> RunSpec[Any]:
    """Return the run with the date that chat templates write.

    It is the config's, or the one with which the run began; a run that begins takes the time.
    """
    if spec.data.date is not None:
        return spec
    kept, file = None, directory.config_path
    if spec.run.resume != "never" and file.is_file():
        with suppress(ConfigError):  # a damaged file is reported when its settings are compared
            tree = read_tree(file.read_text(encoding="utf-8"), str(file)).values
            kept = value_at(tree, ("data", "date"))
    date = str(kept) if kept else datetime.now().isoformat(timespec="seconds")
    data = {"data": spec.data.model_copy(update={"date": date})}
    config, written = (settings.model_copy(update=data) for settings in (spec.config, spec.written))
    return replace(spec, config=config, written=written)


def _tell_and_log(log: RunLog, text: str) -> None:
    """Show a message before the run's display is open, and log it."""
    tell(text)
    log.add(text)


def _first_line() -> str:
    """Return what the log says first: the version, the process and the command."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    process = f"process {os.getpid()} on {socket.gethostname()}"
    return f"Plimsoll {__version__}, {process}: {command}"


def _open_health_watch(spec: RunSpec[Any], directory: RunDirectory) -> HealthWatch | None:
    """Return the health watch of a run that samples, fed with its earlier metrics; else None."""
    if spec.sampling is None:
        return None
    path = directory.metrics_path
    return HealthWatch(read_rows(path) if path.is_file() else ())


def evaluates_first(spec: RunSpec[Any], state: RunState) -> bool:
    """Return whether the run evaluates before its first step; only runs that sample do this."""
    return state.step == 0 and spec.run.eval_every is not None and spec.sampling is not None


def _load_state(step: int, checkpoint: Path) -> RunState:
    state = RunState.load(checkpoint / "state.json")
    if state.step != step:
        raise ConfigError(
            f"{checkpoint} is named after step {step}, and its state.json is of step {state.step}: "
            f"steps would come twice or not at all. Give it the name of its own step, or resume "
            f"from another checkpoint (remove this one)."
        )
    return state


@contextmanager
def _add_phase_to_errors(phase: TimedPhase, step: int) -> Iterator[None]:
    try:
        yield
    except OutOfMemory as error:
        raise error.in_phase(phase) from error
    except NodesMissing:
        raise
    except WorkerDied as error:
        who, _, why = str(error).partition("\n")
        raise type(error)(f"{who} in the phase {phase}\n{why}") from error
    except FunctionFailed as error:
        what, _, lines = str(error).partition("\n")
        before = ", before training" if step == 0 else ""
        where = f"  In the phase {phase} of step {step}{before}"
        raise FunctionFailed("\n".join((what, where, lines)).rstrip()) from error


def config_text(spec: RunSpec[Any]) -> str:
    """Return the text of config.yaml: the job, the decisions for `auto`, and every setting.

    A decision is a comment. The setting itself stays `auto`, because the model may be evaluated or
    trained further on other hardware.
    """
    decisions = [f"# {made.key}: auto is {made.value}, since {made.why}" for made in spec.decisions]
    return "\n".join([f"# {spec.job.name}", *decisions, dump_config(spec.written)])


def step_metrics(results: Sequence[UpdateResult], rate: float) -> dict[str, float]:
    """Return the metrics of one optimizer step from the results of all ranks.

    They are the means over the batch, `grad_norm`, `skipped_steps` (0 or 1) and `learning_rate`.
    """
    norm = results[0].grad_norm
    update = {"grad_norm": norm, "skipped_steps": count_skipped(norm), "learning_rate": rate}
    return total_metrics(results) | update


def mean_metrics(updates: Sequence[Sequence[UpdateResult]]) -> dict[str, float]:
    """Return the mean of each metric over several optimizer steps, and `skipped_steps`, their sum.

    `updates` has the results of all ranks for each step. A metric that only some steps have is
    averaged over these steps.
    """
    totals = [total_metrics(results) | {"grad_norm": results[0].grad_norm} for results in updates]
    names = dict.fromkeys(name for total in totals for name in total)
    means = {name: mean(t[name] for t in totals if name in t) for name in names}
    return means | {"skipped_steps": sum(count_skipped(t["grad_norm"]) for t in totals)}


def count_skipped(grad_norm: float) -> float:
    """Return 1 if the step was skipped because its gradient norm is not finite, else 0."""
    return float(not isfinite(grad_norm))


def total_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return the means over the batch by name: the sums of the ranks' shares.

    A metric that a rank lacks counts as 0 there.
    """
    names = dict.fromkeys(name for result in results for name in result.metrics)
    return {name: sum(result.metrics.get(name, 0.0) for result in results) for name in names}


def lineage_of(spec: RunSpec[Any]) -> str:
    """Return a fingerprint of the settings that decide what a run samples.

    The seed is among them. The rest of `run`, `cluster`, the number of engines and how they get
    weights are not: a run may go on with fewer nodes. Settings with their default are left out, so
    a key that a later version adds changes nothing.
    """
    where = {
        **{"run": True, "cluster": True},
        **{"data": {"cache", "processes"}, "rollout": {"engines", "sync"}},
    }
    settings = spec.written.model_dump(mode="json", exclude=where, exclude_defaults=True)
    text = json.dumps([spec.run.seed, settings], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())
