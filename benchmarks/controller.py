"""Measure what a run's controller does, part by part, at growing sizes, and extrapolate.

    python benchmarks/controller.py [PART ...] [--json FILE]

A step costs the controller seconds in which cards wait. Each part is measured at four sizes in CPU
seconds of this process, and the exponent over the larger three of them is fitted: 1 grows with the
size, 2 with its square. What is said of the size that a cluster has is extrapolated by it.

Ranks and engines are simulated: a few Ray actors stand for hundreds of members, and answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import ray

from large_data import TEMPLATE, conversations
from plimsoll.cluster.protocol import Pending, SentOnce, Shortages
from plimsoll.cluster.ray import RayCluster
from plimsoll.cluster.ray_actors import Host, Member
from plimsoll.cluster.route import ActorRoute
from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.planning import summarize_plan
from plimsoll.commands.report import report_run
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.run import RunConfig
from plimsoll.data.dataset import load_samples
from plimsoll.data.loading import Loaded, check_written
from plimsoll.data.stored import fingerprint, token_counts
from plimsoll.data.template import Draft, make_template, render_drafts
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise import advise
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.process import template_runner, templates
from plimsoll.records import (
    BatchColumns,
    Pack,
    Prompt,
    RewardPart,
    Sample,
    Trajectory,
    cut,
    single_turn,
)
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.batch import (
    Batch,
    batch_metrics,
    estimate_advantages,
    has_kl_loss,
    pack_batch,
    policy_columns,
    score_batch,
    with_columns,
)
from plimsoll.run.directory import RunDirectory, open_run
from plimsoll.run.health import HealthWatch
from plimsoll.run.json_lines import append_rows, read_rows
from plimsoll.run.ledger import LeakWatch, Ledger, LedgerFile, LedgerRow, memory_use
from plimsoll.run.readings import CardReading, HostReading, Reading
from plimsoll.run.trajectories import to_bytes, write_trajectories
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sync.channel import Channel
from plimsoll.trainer.weights import PlannedBucket, WeightPlan

Job = Callable[[], Any]
"""What is measured; its preparation is not."""


@dataclass(frozen=True)
class Part:
    """A part of the controller's work.

    Attributes:
        prepare: returns the work of a size.
        unit: of what the size is a number.
        sizes: at which it is measured.
        target: for which its cost is extrapolated.
        meaning: what that size is.
        has_bytes: whether the memory that is allocated is measured, too; mapped files are not.
    """

    prepare: Callable[[int, ExitStack], Job]
    unit: str
    sizes: tuple[int, ...]
    target: int
    meaning: str
    has_bytes: bool = False


@dataclass(frozen=True)
class Measured:
    """CPU seconds of a part at its sizes; bytes a unit at the peak and sent, if measured."""

    seconds: tuple[float, ...]
    peak: int | None
    sent: int | None

    def exponent(self, sizes: Sequence[int]) -> float:
        """Return the slope of log seconds over log size, without the smallest size."""
        x, y = np.log(sizes[1:]), np.log(np.maximum(self.seconds[1:], 1e-6))
        return float(np.polyfit(x, y, 1)[0])

    def at(self, size: int, sizes: Sequence[int]) -> float:
        """Return the seconds at a size beyond those measured."""
        return float(self.seconds[-1] * (size / sizes[-1]) ** max(1.0, self.exponent(sizes)))


PROMPT, RESPONSE, GROUP, STREAMS = 256, 8192, 16, 64
"""Tokens of a prompt and of a response, responses of a prompt, and data-parallel streams."""
T134 = 1024 * GROUP * RESPONSE
TOKENS = tuple(2**e * GROUP * RESPONSE for e in range(4, 8))
STEPS = (1000, 2000, 4000, 8000)
CALLS = tuple(4**e * 256 for e in range(4))


class Streams:
    """A group whose ranks answer at once: with a log-prob of -1 for each learned token."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.shortages = Shortages()
        self.own_groups: dict[str, Any] = {}
        self.sent = 0  # bytes

    def call(self, task: Callable[..., Any], per_stream: Iterable[tuple[Any, ...]]) -> Pending[Any]:
        """Put each stream's arguments into bytes, as Ray does, and answer."""
        answers = []
        for arguments in per_stream:
            context = ray._private.worker.global_worker.get_serialization_context()
            for argument in arguments:
                if not getattr(argument, "reference", False):
                    self.sent += context.serialize(argument).total_bytes
                if isinstance(argument, SentOnce):
                    argument.reference = True
            packs: Sequence[Pack] = arguments[1]
            answers.append([np.full(p.loss_tokens, -1, np.float32) for p in packs])
        return Pending(lambda: answers)


def settings(home: Path) -> RunSpec[RlConfig]:
    """Return GRPO with a KL term and a correction, whose log-probs are all scored."""
    role = {"model": {"path": str(home / "model"), "dtype": "float32"}}
    return spec_of(
        RlConfig.model_validate(
            {
                "run": {"steps": 1, "directory": str(home / "run"), "seed": 0},
                "cluster": {"where": "ray", "device": "cpu", "threads": 1, "ranks": STREAMS},
                "data": {
                    "train": {"path": str(home / "rows.jsonl"), "prompt": "prompt"},
                    "chat_template": "none",
                    "max_tokens": PROMPT,
                },
                "batch": {
                    "prompts": 1024,
                    "responses": GROUP,
                    "micro_batch_tokens": 65536,
                    "share_prompts": True,
                },
                "actor": role | {"optimizer": {"learning_rate": 1e-6}},
                "reference": role,
                "rewards": {"length": {"name": "length"}},
                "rollout": {
                    "transformers": {},
                    "dtype": "float32",
                    "sampling": {"max_new_tokens": RESPONSE},
                },
                "algorithm": {"advantage": {"name": "grpo"}, "kl": {"place": "loss"}},
            }
        )
    )


def episodes(tokens: int) -> list[Trajectory]:
    """Return a step's responses: half of them nearly as long as allowed, words of a vocabulary."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(tokens // RESPONSE // GROUP):
        prompt = Prompt(number, rng.integers(0, 150_000, PROMPT).astype(np.int32), "x" * PROMPT)
        for sample in range(GROUP):
            ids = rng.integers(0, 150_000, RESPONSE)
            logprobs = -rng.exponential(0.5, RESPONSE).astype(np.float32)
            part = (RewardPart("length", float(rng.integers(0, 2))),)
            text = "word " * RESPONSE
            found.append(
                single_turn(prompt, sample, ids, logprobs, text, "stop", 1, part, group=number)
            )
    return found


def step_part(name: str, tokens: int, stack: ExitStack) -> Job:
    """Return one part of a step over a number of sampled tokens."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_model(home)
    spec, sampled = settings(home), episodes(tokens)
    cluster: Any = Streams(STREAMS)
    algorithm = spec.config.algorithm
    if name == "pack":
        return lambda: pack_batch(sampled, spec, STREAMS, STREAMS, 1)
    batch = pack_batch(sampled, spec, STREAMS, STREAMS, 1)
    if name == "score":
        return lambda: score_batch(batch, spec, cluster)
    scores = score_batch(batch, spec, cluster)
    if name == "advantages":
        return lambda: estimate_advantages(batch, scores, algorithm, 0.1, {})
    columns = {**scores, **estimate_advantages(batch, scores, algorithm, 0.1, {})}
    if name == "metrics":
        return lambda: batch_metrics(batch, columns, 0.1)
    if name == "journal":
        groups = [sampled[i : i + GROUP] for i in range(0, len(sampled), GROUP)]
        return lambda: [to_bytes(group) for group in groups]
    if name == "trajectories":
        return lambda: write(home, sampled, batch, columns)
    assert name == "train"
    return lambda: send(cluster, spec, batch, columns)


def write(home: Path, sampled: list[Trajectory], batch: Batch, columns: BatchColumns) -> None:
    """Write a step's trajectories with what was computed of them."""
    computed = {column: entries for column, entries in columns.items() if not column.sampled}
    write_trajectories(home / "step.parquet", 1, with_columns(sampled, batch, computed))


def send(cluster: Any, spec: RunSpec[RlConfig], batch: Batch, columns: BatchColumns) -> None:
    """Send the ranks what the actor's update needs."""
    of_loss = policy_columns(columns, has_kl_loss(spec.config.algorithm))
    for mini in batch.minis:
        cluster.call(None, (("actor", p, [cut(of_loss, pack) for pack in p]) for p in mini.packs))


def whole_step(tokens: int, stack: ExitStack) -> Job:
    """Return all parts of a step one after the other, as the loop has them."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_model(home)
    spec, sampled = settings(home), episodes(tokens)
    cluster: Any = Streams(STREAMS)

    def step() -> int:
        cluster.sent = 0
        batch = pack_batch(sampled, spec, STREAMS, STREAMS, 1)
        scores = score_batch(batch, spec, cluster)
        columns = {**scores, **estimate_advantages(batch, scores, spec.config.algorithm, 0.1, {})}
        write(home, sampled, batch, columns)
        send(cluster, spec, batch, columns)
        batch_metrics(batch, columns, 0.1)
        return int(cluster.sent)

    return step


def write_model(home: Path) -> None:
    """Write a tiny model and a row, so that the settings name files that exist."""
    from plimsoll.model.tiny import tiny_config, write_tiny_model

    write_tiny_model(home / "model", tiny_config("qwen2", True, vocab=32), 0, make_tokenizer())
    (home / "rows.jsonl").write_text('{"prompt": "1+1="}\n')


@ray.remote(num_cpus=0, max_concurrency=100_000)
class Light:
    """Stands for many ranks or engines, and answers at once."""

    def __init__(self, plan: WeightPlan | None) -> None:
        self._plan = plan
        self._never = asyncio.Event()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Answer as a rank or an engine does."""
        if method == "generate":
            [request] = arguments
            answer = np.zeros(4, np.int64), np.zeros(4, np.float32)
            return [
                single_turn(prompt, i, *answer, "", "stop", 0)
                for prompt in request.prompts
                for i in range(request.responses)
            ]
        if method == "weight_plan":
            return self._plan
        return Channel("host", 2**28) if method == "open_channel" else 0

    async def call_each(self, method: str, each: Any) -> None:
        """Answer once for all, as if the data planes had done the rest."""

    async def watch(self) -> None:
        """Wait for ever."""
        await self._never.wait()

    async def sign(self) -> None:
        """Give no sign: nothing asks for it within a benchmark's seconds."""
        await self._never.wait()


class SimulatedCluster(RayCluster):
    """A `RayCluster` whose members are played by a few actors."""

    def __init__(self, ranks: int, engines: int, plan: WeightPlan | None = None) -> None:
        self._count, self._plan = ranks, plan
        rollout = RolloutConfig.model_validate({"transformers": {"max_sequences": 256}})
        spec = EngineSpec(0, "model", 1024, 1, "cpu", rollout)
        config = ClusterConfig.model_validate({"where": "ray", "hang_timeout": 0, "ranks": ranks})
        super().__init__(config, [replace(spec, index=i) for i in range(engines)], 1, "cpu")

    def _start_members(self, config: Any, specs: Any, threads: int, device: Any) -> None:
        actors = [Light.remote(self._plan) for _ in range(4)]  # type: ignore[attr-defined]
        host = Host(0, "127.0.0.1", 0, "", "", ())

        def play(role: str, count: int) -> list[Member]:
            return [Member(f"{role} {i}", actors[i % 4], host) for i in range(count)]

        self.members = self._ranks = play("training rank", self._count)
        self._groups = {"actor": self}
        self._engines = play("rollout engine", len(specs))
        ray.get([actor.call.remote("ready") for actor in actors])
        self._watch((*self._ranks, *self._engines))

    def close(self) -> None:
        """Leave Ray."""
        self._watches.clear()
        ray.shutdown()


@contextmanager
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def ask_all(responses: int, stack: ExitStack) -> Job:
    """Return a step's requests, all in flight at once to 64 engines."""
    cluster = stack.enter_context(closing(SimulatedCluster(8, 64)))
    loop = stack.enter_context(other_loop())
    tokens = np.zeros(PROMPT, np.int32)

    async def ask(number: int) -> None:
        request = Request((Prompt(number, tokens, ""),), GROUP, SamplingConfig(), number)
        await cluster.ask(request, number)

    async def everything() -> None:
        await asyncio.gather(*map(ask, range(responses // GROUP)))

    def run() -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(everything(), loop)
        cluster.wait_for(future)

    return run


def call_group(ranks: int, stack: ExitStack) -> Job:
    """Return a call of every rank of a group."""
    cluster = stack.enter_context(closing(SimulatedCluster(ranks, 0)))
    return lambda: cluster.all(_anything)


def _anything() -> None:
    """Do what the simulated members do at any call."""


def send_weights(members: int, stack: ExitStack) -> Job:
    """Return a sync of a 70B model's 723 tensors to half as many engines as there are ranks."""
    names = tuple(f"model.layers.{i // 9}.part_{i % 9}.weight" for i in range(723))
    count = 70 * 2 * 10**9 // 2**28
    edges = [i * 723 // count for i in range(count + 1)]
    buckets = tuple(PlannedBucket(names[a:b]) for a, b in pairwise(edges))
    engines = members // 9
    plan = WeightPlan(names, buckets, (2**28,) * count)
    cluster = stack.enter_context(closing(SimulatedCluster(members - engines, engines, plan)))
    rollout = RolloutConfig.model_validate({"transformers": {}, "sync": {"route": "host"}})
    route = ActorRoute(cluster, "actor", 4096, rollout)
    return lambda: route.transfer(2**28, 1)


def planned(cards: int) -> tuple[RunSpec[RlConfig], Ground]:
    """Return GRPO of a 7B model on nodes of 8 cards, half of them engines', and the machines.

    A micro-batch is too large for a rank.
    """
    nodes, model = cards // 8, {"path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16"}
    text: dict[str, Any] = {
        "run": {"steps": 1, "directory": "out"},
        "cluster": {"hardware": "8xA100-80GB", "host_memory": "1TB", "device": "cuda"},
        "data": {"train": {"path": "rows.jsonl", "prompt": "prompt"}, "max_tokens": PROMPT},
        "batch": {"prompts": 4096, "responses": GROUP, "micro_batch_tokens": 262_144},
        "actor": {"model": model, "zero": {"stage": 3}, "optimizer": {"learning_rate": 1e-6}},
        "reference": {"model": model},
        "rewards": {"length": {"name": "length"}},
        "rollout": {"vllm": {}, "engines": cards // 2, "sampling": {"max_new_tokens": RESPONSE}},
        "algorithm": {"advantage": {"name": "grpo"}, "kl": {"place": "loss", "estimator": "k3"}},
    }
    text["cluster"] |= {"ranks": cards // 2, "nodes": nodes}
    spec = spec_of(RlConfig.model_validate(text))
    return spec, Ground(parse_cluster("8xA100-80GB", nodes, 10**12))


def plan_run(cards: int, stack: ExitStack) -> Job:
    """Return the plan of a run as its directory has it, with the peaks of each process."""
    spec, ground = planned(cards)
    return lambda: summarize_plan(spec, make_plan(spec, ground))


def suggest(cards: int, stack: ExitStack) -> Job:
    """Return the search for settings with which a run fits."""
    return lambda: advise(*planned(cards))


GB = 10**9
PHASES = ("rollout", "score", "train_actor", "sync")


def readings_of(cards: int, rng: np.random.Generator) -> dict[str, Reading]:
    """Return the readings of ranks on nodes of eight cards, which differ by a few percent."""
    found = {}
    for rank, part in enumerate(rng.normal(1, 0.02, cards)):
        host = HostReading(f"host {rank // 8}", int(9 * GB * part), 8 * GB, 90 * GB, 999 * GB)
        peaks = int(50 * GB * part), int(60 * GB * part)
        card = CardReading(*peaks, 40 * GB, 55 * GB, 70 * GB, 80 * GB, 0.5)
        found[f"rank {rank}"] = Reading(host, card)
    return found


def ledger_step(ledger: Ledger, file: LedgerFile, cards: int, step: int) -> list[LedgerRow]:
    """Read the memory of all cards after each phase, and write what has moved."""
    rng = np.random.default_rng(step)
    for phase in PHASES:
        ledger.add(phase, readings_of(cards, rng), 1.0)
    rows = ledger.take(step)
    file.add(rows)
    return rows


def keep_ledger(cards: int, stack: ExitStack) -> Job:
    """Return the ledger's work of ten steps, with the search for leaks."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def steps() -> None:
        ledger, file, leaks = Ledger({}, 0), LedgerFile(home / "ledger.jsonl"), LeakWatch()
        for step in range(10):
            rows = ledger_step(ledger, file, cards, step)
            memory_use(rows)
            leaks.add(rows)

    return steps


def finished_run(steps: int, stack: ExitStack) -> RunDirectory:
    """Return a run of 64 cards with its rows, a checkpoint and a file of each step's samples."""
    run = RunDirectory(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    ledger, file = Ledger({}, 0), LedgerFile(run.ledger_path)
    numbers = {f"metric_{i}": 1 / (i + 3) for i in range(80)}
    seconds = {f"seconds/{phase}": 1.0 for phase in PHASES}
    for step in range(1, 100):
        ledger_step(ledger, file, 64, step)
    file.finish()
    rows = ({"step": step, **numbers, **seconds} for step in range(1, steps + 1))
    append_rows(run.metrics_path, rows)
    write_trajectories(run.trajectories_path(1), 1, episodes(GROUP * RESPONSE))
    for step in range(2, steps + 1):
        path = run.trajectories_path(step)
        path.parent.mkdir(exist_ok=True)
        path.hardlink_to(run.trajectories_path(1))
    run.checkpoint_path(steps).mkdir(parents=True)
    return run


def report(steps: int, stack: ExitStack) -> Job:
    """Return the report at the end of a run."""
    path = finished_run(steps, stack).path
    return lambda: report_run(path)


def resume(steps: int, stack: ExitStack) -> Job:
    """Return what a resume does with a run's files, without those of its checkpoint."""
    run = finished_run(steps, stack)
    config = RunConfig(directory=str(run.path), steps=steps, resume="auto")

    def open_again() -> None:
        with open_run(config) as opened:
            HealthWatch(read_rows(opened.metrics_path))
            opened.remove_trajectories_after(steps)

    return open_again


def start_rows(rows: int, stack: ExitStack, *, kept: bool) -> Job:
    """Return a start of a run over conversations of about 200 tokens; the rows are held after it.

    `kept`: whether an earlier start has kept them.
    """
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    file = home / "rows.jsonl"
    with file.open("w") as lines:
        lines.writelines(conversations(rows, 33))
    template = make_template(make_tokenizer(), TEMPLATE, None)
    source = SourceConfig(path=str(file), messages="messages")

    def start(cache: Path) -> Loaded[Sample]:
        data = DataConfig(train=source, max_tokens=2**20, cache=str(cache), processes=1)
        loaded = load_samples(data, source, template)
        fingerprint(loaded.items)
        token_counts(loaded.items)
        return loaded

    folders = (home / f"cache{number}" for number in count())
    if kept:
        start(home)
    return lambda: start(home if kept else next(folders))


def render_long(turns: int, stack: ExitStack) -> Job:
    """Return rendering a conversation in this process, and finding what is learned of it."""
    signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the child's limit of time

    def answer(source: str, lines: Sequence[str]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in template_runner.answer([source, f"[{lines[0]}]"])]

    stack.enter_context(mock.patch.object(templates, "_ask", answer))
    roles = ("user", "assistant")
    conversation = [{"role": roles[i % 2], "content": f"number {i} " * 20} for i in range(turns)]
    template = make_template(make_tokenizer(), TEMPLATE, None)

    def run() -> None:
        [pieces] = render_drafts([Draft(template, "conversation", conversation)])
        assert not isinstance(pieces, ConfigError)
        check_written(conversation, pieces[0].text)

    return run


def _step(name: str, *, has_bytes: bool = False) -> Part:
    meaning = "1,024 prompts x 16 responses x 8,192 tokens"
    return Part(partial(step_part, name), "tokens", TOKENS, T134, meaning, has_bytes)


PARTS: dict[str, Part] = {
    "whole step": replace(_step("pack", has_bytes=True), prepare=whole_step),
    **{name: _step(name) for name in ("pack", "score", "advantages", "metrics", "journal")},
    **{name: _step(name) for name in ("trajectories", "train")},
    **{
        name: Part(partial(start_rows, kept=kept), "rows", sizes, 10**7, "rows of 200 tokens", True)
        for name, kept, sizes in (
            ("rows, first start", False, (10_000, 20_000, 40_000, 80_000)),
            ("rows, second start", True, (10_000, 20_000, 40_000, 160_000)),
        )
    },
    "conversation": Part(render_long, "turns", (256, 512, 1024, 2048), 8192, "turns of 40 words"),
    "requests": Part(ask_all, "responses", CALLS, 65536, "in flight to 64 engines"),
    "group call": Part(call_group, "ranks", (64, 128, 256, 512), 1024, "ranks, one call"),
    "plan": Part(plan_run, "cards", (8, 64, 512, 4096), 8192, "GRPO of 7B, half of them engines'"),
    "suggest": Part(suggest, "cards", (8, 64, 256, 1024), 8192, "the same; does not fit as it is"),
    "ledger": Part(keep_ledger, "cards", (32, 64, 128, 256), 1024, "cards, ten steps"),
    "report": Part(report, "steps", STEPS, 10_000, "steps of 64 cards"),
    "resume": Part(resume, "steps", STEPS, 10_000, "steps of 64 cards"),
    "weight sync": Part(send_weights, "members", (18, 36, 72, 144), 1024, "70B, 256 MiB buckets"),
}


def measure(part: Part) -> Measured:
    """Return the part's CPU seconds at all its sizes, the less of two runs each."""
    seconds, peak, sent = [], None, None
    for size in part.sizes:
        with ExitStack() as stack:
            job = part.prepare(size, stack)
            runs = []
            for _ in range(2):
                start = time.process_time()
                job()
                runs.append(time.process_time() - start)
            seconds.append(min(runs))
            if part.has_bytes and size == part.sizes[1]:
                before = pa.total_allocated_bytes()
                tracemalloc.start()
                made = job()
                sent = int(made / size) if isinstance(made, int | float) else None
                arrow = pa.total_allocated_bytes() - before
                peak = int((tracemalloc.get_traced_memory()[1] + arrow) / size)
                tracemalloc.stop()
                del made
    return Measured(tuple(seconds), peak, sent)


def main() -> None:
    """Print a row for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is named {unknown[0]!r}: {', '.join(PARTS)}")
    figures = {}
    print(
        "| part | sizes | CPU seconds | exponent | extrapolated |\n| --- | --- | --- | --- | --- |"
    )
    for name in given.parts or PARTS:
        part = PARTS[name]
        found = measure(part)
        exponent, far = found.exponent(part.sizes), found.at(part.target, part.sizes)
        sizes = f"{part.sizes[0]:,} to {part.sizes[-1]:,} {part.unit}"
        seconds = ", ".join(f"{s:.3g}" for s in found.seconds)
        beside = "" if found.peak is None else f"; {found.peak} bytes of each of the {part.unit}"
        if found.sent is not None:
            beside += f" beside the sampled, {found.sent} sent to the ranks"
        far_text = f"{far:.3g} s at {part.target:,} ({part.meaning}){beside}"
        print(f"| {name} | {sizes} | {seconds} | {exponent:.2f} | {far_text} |", flush=True)
        figures[name] = {"sizes": part.sizes, "seconds": found.seconds, "peak": found.peak}
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
