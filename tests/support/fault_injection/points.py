"""The points of a run at which faults can be injected, and what can happen there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from plimsoll.run.phases import TimedPhase

NOTE = "note"
"""The kind of fault that only records the call."""
KINDS: Mapping[str, str] = {
    "kill": "The process ends at once (SIGKILL).",
    "hang": "The process stops (SIGSTOP), or the call waits for ever where it asks something else.",
    "delay": "The call waits: 5 seconds, or as many as in `delay=2`.",
    "error": "An exception that nobody expects (RuntimeError).",
    "oom": "No memory is left: torch.OutOfMemoryError where torch is imported, else MemoryError.",
    "full": "The disk is full (OSError, ENOSPC).",
    "torn": "The end of the file at this point is missing, and the process ends (SIGKILL).",
    "network": "The connection is reset (ConnectionResetError).",
    "wrong": "The value at this point is wrong: NaN in place of a number.",
    NOTE: "Nothing: the call is recorded (see `PLIMSOLL_FAULTS_DIRECTORY`), and goes on.",
}
"""The kinds of faults, each with its meaning."""

CONDITIONS: Mapping[str, str] = {
    "step": "The step under way is this one, counted from 1.",
    "call": "The process reaches the point for this time, counted from 1.",
    "rank": "The process is this training rank, or this critic rank.",
    "engine": "The process belongs to this rollout engine.",
    "p": "A random draw with this probability, from `seed`, the process and the call.",
    "seed": "The seed of `p`; 0 if it is left out.",
    "after": "It is later than this many seconds since 1970, such as `$(date +%s)`; with `once`.",
    "once": "The fault has not happened before, in any process or earlier part of the run.",
}
"""The conditions of `when`, each with its meaning."""

ANYWHERE = ("kill", "hang", "delay", "error", NOTE)
"""The kinds that can happen at every point."""


@dataclass(frozen=True)
class FaultPoint:
    """A place in the program at which a fault can be injected."""

    name: str
    process: str
    """The process that reaches the point."""
    meaning: str
    more_kinds: tuple[str, ...] = ()
    """The kinds of faults that can happen here beside those that can happen anywhere."""
    has_step: bool = False
    """Whether the point knows the step under way."""
    asks: bool = False
    """Whether `hang` makes the call wait, as if its answer never came, and stops no process."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of faults that can happen here."""
        return (*ANYWHERE, *self.more_kinds)


_CONTROLLER, _RANK, _ENGINE = "controller", "training rank", "rollout engine"

POINTS: Mapping[str, FaultPoint] = {
    point.name: point
    for point in (
        FaultPoint("controller.start", _CONTROLLER, "The run directory is open; nothing is loaded"),
        *(
            FaultPoint(
                f"controller.{phase}",
                _CONTROLLER,
                f"The phase `{phase}` begins",
                ("oom",),
                has_step=True,
            )
            for phase in get_args(TimedPhase)
        ),
        FaultPoint("rank.start", _RANK, "The rank has joined the others; no model is loaded"),
        FaultPoint(
            "rank.forward",
            _RANK,
            "The loss of a micro-batch is computed; `wrong` makes it NaN",
            ("oom", "wrong"),
        ),
        FaultPoint("rank.backward", _RANK, "A micro-batch's backward pass begins", ("oom",)),
        FaultPoint(
            "rank.step",
            _RANK,
            "All micro-batches are done and the optimizer step begins; `step` counts the steps of "
            "this optimizer",
            ("oom",),
            has_step=True,
        ),
        FaultPoint("rank.send", _RANK, "A bucket of weights is gathered for the engines", ("oom",)),
        FaultPoint("engine.start", _ENGINE, "The engine begins to load its model", ("oom",)),
        FaultPoint(
            "engine.request",
            _ENGINE,
            "A request has come; nothing is sampled. `step` is the weights' version plus 1",
            ("oom", "network"),
            has_step=True,
        ),
        FaultPoint(
            "engine.answer",
            _ENGINE,
            "The answers of a request are complete; `wrong` spoils their log-probs",
            ("network", "wrong"),
            has_step=True,
        ),
        FaultPoint(
            "engine.receive",
            _ENGINE,
            "A bucket of weights has come; `wrong` changes the weights",
            ("oom", "network", "wrong"),
        ),
        FaultPoint(
            "reward.call",
            "the process that scores",
            "A reward function or server has answered; `wrong` makes the reward NaN",
            ("oom", "network", "wrong"),
            asks=True,
        ),
        FaultPoint(
            "environment.call",
            "the process that plays episodes",
            "An environment is about to be made, reset, given a turn or asked for its reward",
            ("oom", "network"),
            asks=True,
        ),
        FaultPoint(
            "rollouts.begin",
            _CONTROLLER,
            "A step's trajectories are about to be written, beside its training",
            has_step=True,
        ),
        FaultPoint(
            "rollouts.write",
            _CONTROLLER,
            "A step's trajectories have their name, and the journal still holds them",
            ("full", "torn"),
            has_step=True,
        ),
        FaultPoint(
            "checkpoint.begin",
            _CONTROLLER,
            "A checkpoint is due; nothing is written",
            has_step=True,
        ),
        FaultPoint(
            "checkpoint.file",
            "every process that writes",
            "A file of a checkpoint is written; others are not",
            ("full", "torn"),
        ),
        FaultPoint(
            "checkpoint.rename",
            _CONTROLLER,
            "All files of a checkpoint are written; it does not have its name yet",
            ("full", "torn"),
            has_step=True,
        ),
        FaultPoint(
            "checkpoint.done",
            _CONTROLLER,
            "A checkpoint has its name; older ones are not removed yet",
            ("torn",),
            has_step=True,
        ),
        FaultPoint(
            "metrics.write",
            _CONTROLLER,
            "A step's metrics are about to be written",
            ("full",),
            has_step=True,
        ),
        FaultPoint(
            "metrics.done",
            _CONTROLLER,
            "A step's metrics are written",
            ("torn",),
            has_step=True,
        ),
        FaultPoint(
            "rows.read",
            _CONTROLLER,
            "A source of rows is about to be read",
            asks=True,
        ),
        FaultPoint(
            "notify.send", _CONTROLLER, "A message is about to be sent", ("network",), asks=True
        ),
        FaultPoint("page.answer", "plimsoll watch", "A request for the page has come", asks=True),
    )
}
"""Every place at which a fault can be injected, by its name."""
