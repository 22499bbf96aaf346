"""One episode: the policy and its environment speak in turn until one of them is done.

The policy's tokens are kept as they were sampled; what is put between is what the chat template
writes there, and never learned. What ends an episode:

- the environment says so, or a reply of a policy that calls tools has no call: `stop`;
- a turn was cut, or there is no room for another: `length`;
- `max_turns` were sampled: `turns`; `episode_seconds` have gone by: `time`.

An episode is one sequence of tokens; or several branches, where with `rewritten: branch` the
template writes the whole conversation anew for the next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from plimsoll.config.environment import EnvironmentConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.environment.calls import Begun, EnvironmentFailed
from plimsoll.environment.conversation import Conversation, ended
from plimsoll.environment.protocol import Message, Reply
from plimsoll.environment.seat import Seat
from plimsoll.environment.speech import Speech, answering, identified, readable, rendered
from plimsoll.records import FinishReason, Prompt, Trajectory, Transcript
from plimsoll.reward.outcome import Failed
from plimsoll.rollout.protocol import Ask, Request

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """An environment as a run has it. name: in the config. most_prompt: tokens of a prompt."""

    name: str
    config: EnvironmentConfig
    speech: Speech
    most_prompt: int

    @property
    def longest(self) -> int:
        """Tokens of prompt and episode together."""
        return self.most_prompt + self.config.max_tokens


@dataclass(frozen=True)
class Policy:
    """Who speaks in an episode. ask: an engine; episode: the number that it knows this one by.
    seed: of the first turn."""

    ask: Ask
    episode: int
    sampling: SamplingConfig
    seed: int

    async def says(
        self, prompt: Prompt, turn: int, most: int, stop: Sequence[str] = ()
    ) -> Trajectory:
        """A turn of at most so many tokens. stop: strings that end it beside the run's own."""
        seed = int(np.random.SeedSequence([self.seed, turn]).generate_state(1)[0])
        sampling = self.sampling
        if stop:
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *stop)})
        [answer] = await self.ask(Request((prompt,), 1, sampling, seed, (most,)), self.episode)
        return answer


@dataclass
class _Told:
    """What is told of an episode while it is played, as it ends wherever its time is over."""

    branches: list[Conversation] = field(default_factory=list)
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
    make_seat: Callable[[], Seat],
    table: Table,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: Policy,
) -> Trajectory:
    """An episode, with the environment's part of the reward. make_seat: for this episode.

    Raises EnvironmentFailed where the environment fails, and DataError where the chat template
    refuses what it says.
    """
    seat, told = make_seat(), _Told()
    try:
        try:
            async with asyncio.timeout(table.config.episode_seconds):
                reason = await _turns(table, prompt, group_seed, policy, seat, told)
        except TimeoutError:
            reason = "time"
        branches = [one for one in told.branches if one.turns]
        if not branches:
            seconds = f"{table.config.episode_seconds:g} s (episode_seconds)"
            raise EnvironmentFailed(Failed(f" had not begun after {seconds}", unanswered=True))
        whole = await told.timed(seat.reward())
        figures = {**counted_turns(branches), **told.figures}
        found = ended(branches, sample_index, reason, whole, figures)
        return replace(found, transcript=Transcript(seat.environment, told.messages))
    finally:
        await seat.close()


async def _turns(
    table: Table, prompt: Prompt, group_seed: int, policy: Policy, seat: Seat, told: _Told
) -> FinishReason:
    """Play; gives why it ended."""
    config = table.config
    begun = await told.timed(seat.reset(row_of(prompt, group_seed, table.speech)))
    speech = table.speech.knowing(begun.tools) if config.describe_tools else table.speech
    messages, first = _begun(table, speech, prompt, begun)
    longest = len(first.tokens) + config.max_tokens
    told.branches.append(Conversation(first))
    for turn in range(1, config.max_turns + 1):
        conversation = told.branches[-1]
        asked = conversation.asked()
        room = longest - len(asked.tokens)
        most = min(prompt.max_new_tokens or policy.sampling.max_new_tokens, room)
        answer = await policy.says(asked, turn, most)
        reply = identified(speech.read(answer.response_tokens, begun.tools), turn)
        told.add(answer.figures)
        conversation = told.branches[-1] = conversation.said(answer, reply.problem or "")
        told.messages.append(rendered(reply.message))
        if answer.finish_reason == "length":
            return "length"
        heard = await told.timed(seat.step(reply))
        told.add(heard.figures)
        conversation = told.branches[-1] = conversation.rewarded(heard.reward)
        if heard.done:
            return "stop"
        if turn == config.max_turns:
            return "turns"
        after = answering([speech.cut(one) for one in heard.messages], reply.tool_calls)
        goes_on = _goes_on(conversation, config, speech, messages, reply, after, answer)
        if len(goes_on[-1].all_tokens) >= longest:
            return "length"
        told.branches[-1:] = goes_on
        told.messages += map(rendered, after)
        messages = [*messages, rendered(reply.message), *map(rendered, after)]
    raise AssertionError("max_turns is 1 or more")


def _goes_on(
    conversation: Conversation,
    config: EnvironmentConfig,
    speech: Speech,
    messages: Sequence[Mapping[str, Any]],
    reply: Reply,
    after: Sequence[Message],
    answer: Trajectory,
) -> list[Conversation]:
    """The conversation with what the environment said; or, where the template writes anew what came
    before and the config says so, as it is, and another branch that begins with all of it."""
    if config.rewritten == "branch" and all(one.role != "raw" for one in after):
        said, heard = rendered(reply.message), [*map(rendered, after)]
        if speech.is_rewritten(messages, said, heard):
            anew = np.array(speech.begins([*messages, said, *heard]), np.int32)
            return [conversation, Conversation(replace(conversation.prompt, tokens=anew))]
    tokens = speech.follows(messages, reply, after, answer.response_tokens)
    text = "\n".join(map(readable, after))
    return [conversation.told(after[-1].role, tokens, text)]


def counted_turns(branches: Sequence[Conversation]) -> dict[str, float]:
    """How often the policy spoke; and in how many branches, where there are several."""
    spoken = sum(turn.role == "assistant" for one in branches for turn in one.turns)
    several = {"branches": float(len(branches))} if len(branches) > 1 else {}
    return {"turns": spoken, **several}


def row_of(prompt: Prompt, seed: int, speech: Speech) -> dict[str, Any]:
    """What an episode is about; the data's own columns before what is told besides."""
    return {
        "prompt": prompt.text,
        "prompt_text": speech.text(prompt.tokens.tolist()),
        "messages": [*prompt.messages],
        "reference": prompt.reference,
        "reference_value": prompt.given_reference,
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
