"""Compare steps that take turns with steps that sample while the ranks train, on delays.

    python benchmarks/asynchronous.py [--steps 20] [--staleness 0 1 4]

The loop, the buffer, the rank, weight sync and its proof are those of a run, on a tiny model. Only
time is made up: a simulated engine works on a few sequences at once and takes a fixed time for each
token; lengths have a long tail. A training step lasts as long as sampling a batch alone does on
average, so an engine and a trainer of equal speed take turns or work side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from plimsoll.cluster.dispatch import EngineQueue
from plimsoll.cluster.local import LocalCluster
from plimsoll.cluster.protocol import Pending
from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import train
from plimsoll.jobs.which import spec_of
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import WEIGHT_VERSIONS, Trajectory, single_turn
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.score import open_rewards
from plimsoll.rl.live import Live
from plimsoll.rl.setup import load_prompt_data
from plimsoll.run.json_lines import read_rows, write_rows
from plimsoll.run.readings import Planned
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_roles
from plimsoll.trainer.worker import Worker

R = TypeVar("R")

PROMPTS, RESPONSES, PLACES = 8, 4, 16
"""Groups of a step, responses of a group, and sequences that the engine works on at once."""
TOKEN_SECONDS, LONGEST = 0.01, 400


def draw_lengths(seed: int, count: int) -> Sequence[int]:
    """Return lengths of responses with a long tail: log-normal, median 40, a few at the limit."""
    lengths = np.random.default_rng(seed).lognormal(np.log(40), 1.0, count)
    return [int(length) for length in np.clip(lengths, 1, LONGEST)]


def sampling_seconds(seed: int) -> float:
    """Return how long the engine takes for one batch alone."""
    free = [0.0] * PLACES
    for length in draw_lengths(seed, PROMPTS * RESPONSES):
        heapq.heapreplace(free, free[0] + length * TOKEN_SECONDS)
    return max(free)


@dataclass
class Delays:
    """The simulated times of a run.

    Attributes:
        loop: the event loop in which the engine answers.
        training: seconds of a training step.
        versions: the versions of the weights so far, each with the moment from which it was used.
    """

    loop: asyncio.AbstractEventLoop
    training: float
    versions: list[tuple[float, int]]


class DelayedCluster(LocalCluster):
    """A cluster whose rank and engine are real but for the time that they take."""

    def __init__(self, spec: EngineSpec, delays: Delays) -> None:
        super().__init__([spec], 1, "cpu")
        self._delays, self._places = delays, asyncio.Semaphore(PLACES)
        self._queue = EngineQueue(1, PLACES)

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        """Call a method of `Worker`; training takes its time."""
        if task is Worker.train:
            time.sleep(self._delays.training)
        return super().call(task, per_stream)

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of the engine, and note new versions."""
        results = super().engines_do(task, *arguments)
        if task.__name__ == "finish_sync":
            self._delays.versions.append((time.monotonic(), int(str(arguments[0]))))
        return results

    def busy_seconds(self) -> list[float]:
        """Return the seconds in which the simulated engine had requests."""
        return self._queue.busy_seconds()

    def wait_for(self, future: Future[R]) -> R:
        """Return the result of work in another thread."""
        return future.result()

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Return the answers of the simulated engine."""
        lengths = draw_lengths(request.seed, len(request.prompts) * request.responses)
        async with self._queue.serve(request, episode):
            return await asyncio.gather(
                *(
                    self._sample(replace(request, prompts=(prompt,)), i % request.responses, length)
                    for i, (prompt, length) in enumerate(
                        zip(request.each_prompt(), lengths, strict=True)
                    )
                )
            )

    async def _sample(self, request: Request, number: int, length: int) -> Trajectory:
        async with self._places:
            begin = time.monotonic()
            await asyncio.sleep(length * TOKEN_SECONDS)
        moments, versions = zip(*self._delays.versions, strict=True)
        sampled_at = np.linspace(begin, time.monotonic(), length)
        places = np.searchsorted(moments, sampled_at, side="right") - 1
        response = single_turn(
            request.prompts[0],
            number,
            np.full(length, 3),
            np.full(length, -np.log(32), np.float32),
            "",
            "length" if length == LONGEST else "stop",
            0,
        )
        return response.add_columns({WEIGHT_VERSIONS: np.array(versions)[places]})


def settings(home: Path, staleness: int, steps: int) -> RunSpec[RlConfig]:
    """Return the run."""
    role = {"model": {"path": str(home / "model"), "dtype": "float32"}}
    config: dict[str, Any] = {
        "run": {"directory": str(home / f"run-{staleness}"), "steps": steps, "tensorboard": False},
        "cluster": {"where": "ray", "device": "cpu", "threads": 1},
        "data": {
            "train": {"path": str(home / "rows.jsonl"), "prompt": "prompt"},
            "chat_template": "none",
            "max_tokens": 16,
        },
        "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 4096},
        "actor": role | {"optimizer": {"learning_rate": 1e-6}},
        "rewards": {"length": {"name": "length"}},
        "rollout": {
            "transformers": {"max_sequences": PLACES},
            "dtype": "float32",
            "staleness": staleness,
            "sampling": {"max_new_tokens": LONGEST},
        },
        "algorithm": {"advantage": {"name": "grpo"}, "kl": "none"},
    }
    return spec_of(RlConfig.model_validate(config))


def run(spec: RunSpec[RlConfig], training: float) -> list[dict[str, Any]]:
    """Run it, and return the metrics of its steps."""
    rollout = spec.config.rollout
    with open_rewards(spec.config.rewards) as scorer:
        delays = Delays(scorer.loop, training, [(0.0, 0)])
        engine = EngineSpec(0, spec.actor.model.path, 1024, 1, "cpu", rollout)
        load = partial(load_prompt_data, references=scorer.references)
        with open_work(
            spec,
            Planned(),
            lambda session: load(session, spec),
            lambda data: DelayedCluster(engine, delays),
        ) as work:
            load_roles(work)
            started = Live.start(work, scorer, {})
            train(work, started)
            started.close()
    return [*read_rows(Path(spec.run.directory) / "metrics.jsonl")]


def main() -> None:
    """Print a line for each staleness."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    given = parser.parse_args()
    training = fmean(sampling_seconds(seed) for seed in range(1000))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_tiny_model(home / "model", tiny_config("qwen2", True, vocab=32), 0, make_tokenizer())
        rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
        write_rows(home / "rows.jsonl", rows)
        lines = []
        for staleness in given.staleness:
            steps = run(settings(home, staleness, given.steps), training)[3:]  # in full swing
            seconds = fmean(sum(v for k, v in s.items() if k[:8] == "seconds/") for s in steps)
            shares = ("idle/engines", "idle/ranks", "staleness/mean", "groups/dropped")
            figures = [fmean(step.get(name, np.nan) for step in steps) for name in shares]
            lines.append((staleness, seconds, *figures))
    print(f"\na training step: {training:.2f} s, as long as sampling a batch alone")
    print("| staleness | s a step | rate | idle engines | idle ranks | mean age | dropped a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for staleness, seconds, *figures in lines:
        rate = lines[0][1] / seconds
        shown = " | ".join(f"{figure:.2f}" for figure in figures)
        print(f"| {staleness} | {seconds:.2f} | {rate:.2f} | {shown} |")


if __name__ == "__main__":
    main()
