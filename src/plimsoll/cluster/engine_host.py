"""One engine in the process of its actor: its start, its calls, and the reasons of its failures."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.cluster.exit_reason import start_error
from plimsoll.machine.cgroup import oom_kills
from plimsoll.machine.faults import fault_point
from plimsoll.sampler.protocol import EngineSpec, RolloutEngine, rollout_build
from plimsoll.trainer.memory import explain_shortage


class EngineHost:
    """The engine of a spec, in the process that `log` (a path without suffix) is the log of."""

    def __init__(self, spec: EngineSpec, log: str) -> None:
        self._spec = spec
        self._log = log
        self._build = rollout_build(spec.rollout)
        self._build.prepare()

    def start(self) -> int:
        """Load the model; return the engine's `responses_per_request`.

        Raises PlimsollError with the engine's own reason if it cannot start.
        """
        kills = oom_kills()
        try:
            fault_point("engine.start")
            self.engine: RolloutEngine = self._build.start(self._spec)
        except (RuntimeError, ValueError, OSError) as error:
            # An error in a process that the engine starts is only in the log that they share.
            logged = isinstance(error, RuntimeError) and self._build.logged_error(self._log)
            killed = oom_kills() != kills
            raise start_error(self._spec, logged or str(error), killed, self._log) from error
        return self.engine.responses_per_request

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine; return its result."""
        with explain_shortage(torch.device(self._spec.device), lambda: "rollout"):
            return await getattr(self.engine, method)(*arguments)

    async def watch(self) -> str:
        """Wait until the engine dies; return the reason."""
        reason = await self.engine.watch()
        logged = self._build.logged_error(self._log)
        return f"{reason} after {logged}" if logged else reason
