"""Episodes over each family's chat template, played with one real engine: the trainer has the very
tokens that the engine had, and gives those that were sampled the same log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
from chat_families import FAMILIES, Family, end_tokens
from decided import decided_model, decided_role
from random_models import write_random_model
from test_run_sync import PROBE, TEMPERATURE, Pair
from vllm_cases import started

from plimsoll.cluster.protocol import Pending, Shortages
from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig, SyncConfig
from plimsoll.data.continuation import most_calls
from plimsoll.environment.episode import EpisodePolicy, EpisodeRules
from plimsoll.environment.local import EpisodeEnvironment, LocalEnvironment
from plimsoll.environment.messages import TurnCodec
from plimsoll.environment.play import play
from plimsoll.environment.protocol import Message, Observation, Reply, Step, ToolCall
from plimsoll.machine.host import free_port
from plimsoll.machine.incident import OutOfMemory
from plimsoll.records import Ints, Prompt, Trajectory
from plimsoll.rl.layout import lay_out, score
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sync.proof import prepare_sync, prove
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

PROMPTS, RESPONSES = 25, 4
VOCABULARY, LONGEST = 320, 1024
"""The families' tokenizers have 287 to 316 tokens."""
ENDS = sorted({token for family in FAMILIES for token in end_tokens(family)})
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Rewritten = Literal["keep", "branch"]
T = TypeVar("T")


@dataclass(frozen=True)
class Trainer:
    """A `Group`: one rank, in this process."""

    worker: Worker
    streams = 1
    shortages = Shortages()

    def call(self, task: Callable[..., T], per_stream: Iterable[tuple[object, ...]]) -> Pending[T]:
        results = [task(self.worker, *own) for own in per_stream]
        return Pending(lambda: results)

    def all(self, task: Callable[..., T], *arguments: object) -> list[T]:
        return [task(self.worker, *arguments)]

    def memory_error(self, stream: int, shard: int, error: OutOfMemory) -> OutOfMemory:
        return error


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One random model for all families, which ends a turn after some six tokens."""
    model = tmp_path_factory.mktemp("families")
    write_random_model(model, FAMILIES[0].template.tokenizer, VOCABULARY, ENDS)
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    role = decided_role(TrainedRole(model=decided_model(path=str(model), dtype="float32")))
    worker.load_model("actor", role, TEMPERATURE)
    rollout = RolloutConfig(dtype="float32").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, arguments={"block_size": 32})
    )
    with started(EngineSpec(0, str(model), LONGEST, 1, "cpu", rollout)) as (engine, loop):
        yield Pair(worker, engine, loop)
    worker.stop()


@dataclass
class Wandering:
    """Goes on for some turns, and says what nobody would expect."""

    tools: tuple[Mapping[str, Any], ...]
    noise: Sequence[str]
    random: Random = field(default_factory=Random)

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.random.seed(row["prompt"])
        self.left = self.random.randint(1, 4)
        said = self.random.choice([(), (Message("user", self.says()),)])
        return Observation(said, self.tools if self.random.random() < 0.7 else ())

    def step(self, reply: Reply) -> Step:
        self.random.seed(f"{self.left} {reply.text}")
        self.left -= 1
        results = [Message("tool", self.says(), name=call.name) for call in reply.tool_calls]
        said = results or [Message("user", self.says())]
        return Step(Observation(tuple(said)), self.left == 0, reward=len(reply.text))

    def says(self) -> str:
        return "".join(self.random.choices(self.noise, k=self.random.randint(1, 12)))


@dataclass
class Asked:
    """What an engine was asked and gave, by episode."""

    pair: Pair
    turns: dict[int, list[tuple[Ints, Ints]]] = field(default_factory=dict)

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        [answer] = await self.pair.engine.generate(request)
        turn = request.prompts[0].tokens.astype(np.int64), answer.response_tokens.astype(np.int64)
        self.turns.setdefault(episode, []).append(turn)
        return [answer]


def read(family: Family, text: str, tools: Sequence[object]) -> Reply:
    """Whatever is sampled may be a call, or two."""
    most = min(len(text) % 3, most_calls(family.template)) if tools else 0
    calls = tuple(ToolCall("add", {"a": f"{text}{i}"}) for i in range(most))
    return Reply(text, Message("assistant", "" if calls else text, calls), calls, None)


def table(family: Family, rewritten: Rewritten) -> EpisodeRules:
    config = EnvironmentConfig(
        name="wandering", max_turns=5, max_tokens=400, rewritten=rewritten, call_seconds=60
    )
    ends = tuple(end_tokens(family))
    speech = TurnCodec(family.template, ends, partial(read, family), config.max_observation_tokens)
    return EpisodeRules("wandering", config, speech, 600)


def seat(family: Family) -> EpisodeEnvironment:
    noise = [*"aä \n.€", "yo ", "the answer", *family.specials, *family.ends, "<think>"]
    tools = (ADD,) if family.tools else ()
    return LocalEnvironment(lambda: Wandering(tools, noise), 60)


def prompts(family: Family) -> Iterator[Prompt]:
    for i in range(PROMPTS):
        system = [{"role": "system", "content": "Be brief."}] if family.system and i % 2 else []
        messages = [*system, {"role": "user", "content": f"How much is {i}?"}]
        [(tokens, _)] = family.template.tokenize([family.template.render_prompt(messages)])
        yield Prompt(i, tokens, f"{family.name} {i}", messages=messages)


def played(family: Family, rewritten: Rewritten, pair: Pair) -> tuple[list[Trajectory], Asked]:
    """All episodes of the family, side by side."""
    decoder, asked = pair.engine._decoder, Asked(pair)
    decoder.tokenizer, decoder.end_tokens = family.template.tokenizer, tuple(end_tokens(family))
    own, sampling = (
        table(family, rewritten),
        SamplingConfig(max_new_tokens=24, temperature=TEMPERATURE),
    )
    episodes = [(p, i) for p in prompts(family) for i in range(RESPONSES)]

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                play(
                    *(partial(seat, family), own, prompt, 0, i),
                    EpisodePolicy(asked.ask, number, sampling, number),
                )
                for number, (prompt, i) in enumerate(episodes)
            )
        )

    return pair.loop.run(all_of_them()), asked


REWRITING = ("mistral-v0.3", "deepseek-r1")
"""Whatever is said; of the others some need thoughts."""
CASES: list[tuple[Family, Rewritten]] = [
    *((family, "keep") for family in FAMILIES),
    *((family, "branch") for family in FAMILIES if family.name in REWRITING),
]


@pytest.mark.parametrize(
    ("family", "rewritten"), CASES, ids=[f"{family.name} {how}" for family, how in CASES]
)
def test_the_trainers_tokens_are_the_engines(
    family: Family, rewritten: Rewritten, pair: Pair
) -> None:
    found, asked = played(family, rewritten, pair)
    for number, t in enumerate(found):
        turns = asked.turns[number]
        for branch in t.branches:
            whole = np.concatenate([branch.prompt.tokens, branch.response_tokens])
            sampled = np.zeros(len(whole), np.bool_)
            while turns and begins(whole, *turns[0]):
                before, answer = turns.pop(0)
                sampled[len(before) : len(before) + len(answer)] = True
            np.testing.assert_array_equal(branch.loss_mask, sampled[len(branch.prompt.tokens) :])
            assert sampled[-1]  # nothing comes after what was sampled last
        assert turns == []
    assert {t.figures["turns"] for t in found} == {1, 2, 3, 4}
    assert any(t.earlier for t in found) == (rewritten == "branch")
    if rewritten == "keep":  # a branch begins with what the environment said
        roles = {turn.role for t in found for turn in t.turns}
        assert roles == {"assistant", "user", *(["tool"] if family.tools else [])}

    every = [(number, one) for number, t in enumerate(found) for one in t.branches]
    branches = [one for _, one in every]
    members = [np.arange(len(branches))]
    minis = lay_out(branches, members, 1, 4096, beside=[number for number, _ in every])
    scored = score(minis, Trainer(pair.worker), Worker.log_probs, "actor")
    sync = prepare_sync(pair, SyncConfig(bucket_bytes=2**28), PROBE, "float32")
    bound = sync.bound(prove(sync, 0).rounding)
    assert bound < 1e-4
    for one, trainers in zip(branches, scored, strict=True):
        assert np.abs(one.sampler_logprobs[one.loss_mask] - trainers).mean() <= bound


def begins(whole: Ints, before: Ints, answer: Ints) -> bool:
    """Return whether the tokens of a branch begin with a turn and what it was sampled after."""
    turn = np.concatenate([before, answer])
    return np.array_equal(whole[: len(turn)], turn)


def test_the_engine_tells_what_of_a_turns_prompt_its_cache_had(pair: Pair) -> None:
    """Whole blocks of 32: of a prompt of 70 tokens two, once they are there; of the turn after it
    all that was computed, which is not the last sampled token."""
    tokens = np.random.default_rng(0).integers(0, 256, 70)
    sampling = SamplingConfig(max_new_tokens=60, min_new_tokens=60)

    def said(asked: Ints) -> Trajectory:
        request = Request((Prompt(0, asked, ""),), 1, sampling, seed=1)
        [answer] = pair.loop.run(pair.engine.generate(request))
        return answer

    first, again = said(tokens), said(tokens)
    assert first.figures == {"prompt_tokens": 70, "cached_tokens": 0}
    assert again.figures == {"prompt_tokens": 70, "cached_tokens": 64}
    assert len(first.response_tokens) == 60
    longer = said(np.concatenate([tokens, first.response_tokens, tokens]))
    assert longer.figures == {"prompt_tokens": 200, "cached_tokens": 128}
