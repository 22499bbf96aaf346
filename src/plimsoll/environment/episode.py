"""One episode: the policy and its environment speak in turn until one of them is done.

The policy's tokens are kept as they were sampled; what is put between is what the chat template
writes there, and never learned. What ends an episode:

- the environment says so, or a reply of a policy that calls tools has no call: `stop`;
- a turn was cut, or there is no room for another: `length`;
- `max_turns` were sampled: `turns`; `episode_seconds` have gone by: `time`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.calls import Begun, EnvironmentFailed
from plimsoll.environment.conversation import Conversation
from plimsoll.environment.seat import Seat
from plimsoll.environment.speech import Speech, answering, identified, readable, rendered
from plimsoll.records import FinishReason, Played, Prompt, Trajectory
from plimsoll.reward.outcome import Failed
from plimsoll.rollout.protocol import Ask, Request

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """An environment as a run has it. name: in the config. seat: for one episode. most_prompt:
    tokens of a prompt."""

    name: str
    config: EnvironmentConfig
    seat: Callable[[], Seat]
    speech: Speech
    most_prompt: int


@dataclass(frozen=True)
class Policy:
    """Who speaks in an episode. ask: an engine; episode: the number that it knows this one by.
    seed: of the first turn."""

    ask: Ask
    episode: int
    sampling: SamplingConfig
    seed: int

    async def says(self, prompt: Prompt, turn: int, most: int) -> Trajectory:
        """A turn of at most so many tokens."""
        seed = int(np.random.SeedSequence([self.seed, turn]).generate_state(1)[0])
        [answer] = await self.ask(Request((prompt,), 1, self.sampling, seed, (most,)), self.episode)
        return answer


@dataclass
class _Told:
    """What is told of an episode while it is played, as it ends wherever its time is over."""

    conversation: Conversation | None = None
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=lambda: {"environment_seconds": 0.0})

    def add(self, figures: Mapping[str, float]) -> None:
        """Of one turn: they are summed up."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    async def timed(self, work: Awaitable[T]) -> T:
        """What the environment gives, its time counted."""
        start = time.monotonic()
        try:
            return await work
        finally:
            self.add({"environment_seconds": time.monotonic() - start})


async def play(
    table: Table, prompt: Prompt, group_seed: int, sample_index: int, policy: Policy
) -> Trajectory:
    """An episode, with the environment's part of the reward.

    Raises EnvironmentFailed where the environment fails, and DataError where the chat template
    refuses what it says.
    """
    seat, told = table.seat(), _Told()
    try:
        try:
            async with asyncio.timeout(table.config.episode_seconds):
                reason = await _turns(table, prompt, group_seed, policy, seat, told)
        except TimeoutError:
            reason = "time"
        spoken = told.conversation
        if spoken is None:
            seconds = f"{table.config.episode_seconds:g} s (episode_seconds)"
            raise EnvironmentFailed(Failed(f" had not begun after {seconds}"))
        whole = await told.timed(seat.reward())
        sampled = sum(spoken.loss_mask)
        if isinstance(whole, tuple) and len(whole) != sampled:
            said = f"'s get_reward gave {len(whole)} numbers for {sampled} sampled tokens"
            raise EnvironmentFailed(Failed(said))
        turns = sum(turn.role == "assistant" for turn in spoken.turns)
        found = spoken.trajectory(sample_index, reason, whole, {"turns": turns, **told.figures})
        return replace(found, played=Played(seat.environment, told.messages))
    finally:
        await seat.close()


async def _turns(
    table: Table, prompt: Prompt, group_seed: int, policy: Policy, seat: Seat, told: _Told
) -> FinishReason:
    """Play; gives why it ended."""
    config = table.config
    begun = await told.timed(seat.reset(_row(prompt, group_seed, table.speech)))
    speech = table.speech.knowing(begun.tools) if config.describe_tools else table.speech
    messages, first = _begun(table, speech, prompt, begun)
    conversation = Conversation(first)
    for turn in range(1, config.max_turns + 1):
        room = config.max_tokens - conversation.length
        most = min(prompt.max_new_tokens or policy.sampling.max_new_tokens, room)
        answer = await policy.says(conversation.asked(), turn, most)
        reply = identified(speech.read(answer.response_tokens, begun.tools), turn)
        told.add(answer.figures)
        conversation = told.conversation = conversation.said(answer, reply.problem or "")
        told.messages.append(rendered(reply.message))
        if answer.finish_reason == "length":
            return "length"
        heard = await told.timed(seat.step(reply))
        told.add(heard.figures)
        conversation = told.conversation = conversation.rewarded(heard.reward)
        if heard.done:
            return "stop"
        if turn == config.max_turns:
            return "turns"
        after = answering([speech.cut(one) for one in heard.messages], reply.tool_calls)
        tokens = speech.follows(messages, reply, after, answer.response_tokens)
        if conversation.length + len(tokens) >= config.max_tokens:
            return "length"
        text = "\n".join(map(readable, after))
        conversation = conversation.told(after[-1].role, tokens, text)
        told.messages += map(rendered, after)
        messages = [*messages, rendered(reply.message), *map(rendered, after)]
    raise AssertionError("max_turns is 1 or more")


def _row(prompt: Prompt, seed: int, speech: Speech) -> dict[str, Any]:
    """What an episode is about; the data's own columns before what is told besides."""
    return {
        "prompt": prompt.text,
        "prompt_text": speech.text(prompt.tokens.tolist()),
        "messages": [*prompt.messages],
        "reference": prompt.reference,
        "source": prompt.source,
        "seed": seed,
        **prompt.columns,
    }


def _begun(
    table: Table, speech: Speech, prompt: Prompt, begun: Begun
) -> tuple[list[Mapping[str, Any]], Prompt]:
    """The conversation before the first turn, and the prompt that it is. A user's message goes on
    where the row's own ends, and raw text goes on as it is."""
    messages: list[Mapping[str, Any]] = [*prompt.messages]
    if not begun.messages and not speech.template.tools:
        return messages, prompt
    said = [speech.cut(one) for one in begun.messages]
    if said and said[0].role == "raw":
        tokens = [*prompt.tokens.tolist(), *speech.tokens(said[0].content)]
    else:
        for one in said:
            if messages and messages[-1]["role"] == one.role == "user":
                texts = filter(None, (messages[-1]["content"], one.content))
                messages[-1] = {**messages[-1], "content": "\n\n".join(texts)}
            else:
                messages.append(rendered(one))
        tokens = speech.begins(messages)
    if len(tokens) > table.most_prompt:
        said_text = f"'s reset makes a prompt of {len(tokens)} tokens, and data.max_tokens is "
        raise EnvironmentFailed(Failed(f"{said_text}{table.most_prompt}"))
    return messages, replace(prompt, tokens=np.array(tokens, np.int32))
