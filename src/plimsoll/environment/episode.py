"""One episode: the policy and its environment speak in turn until one of them is done.

The policy's tokens are kept as they were sampled. What is put between is what the chat template
writes there, and never learned. An episode ends when

- the environment says so, or a reply of a policy that calls tools has no call: `stop`;
- a turn was cut, or there is no room for another: `length`;
- `max_turns` were sampled: `turns`; `episode_seconds` have gone by: `time`.

An episode is one sequence of tokens; or several branches, if with `rewritten: branch` the template
writes the whole conversation anew for the next turn.
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
from plimsoll.environment.conversation import Conversation, build_trajectory
from plimsoll.environment.local import EpisodeEnvironment
from plimsoll.environment.protocol import Message, Reply
from plimsoll.environment.results import EnvironmentFailed, ResetResult
from plimsoll.environment.turn_codec import (
    TurnCodec,
    match_results,
    readable_text,
    render_message,
    with_call_ids,
)
from plimsoll.records import FinishReason, Prompt, Trajectory, Transcript
from plimsoll.reward.outcome import Failed
from plimsoll.rollout.protocol import Ask, Request

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeRules:
    """What all episodes of one environment of a run have in common."""

    name: str
    """The environment's name in the config."""
    config: EnvironmentConfig
    codec: TurnCodec
    max_prompt_tokens: int

    @property
    def max_tokens(self) -> int:
        """The most tokens of prompt and episode together."""
        return self.max_prompt_tokens + self.config.max_tokens


@dataclass(frozen=True)
class EpisodePolicy:
    """The policy as one episode samples it."""

    ask: Ask
    """Asks an engine."""
    episode: int
    """The number by which the engine knows the episode."""
    sampling: SamplingConfig
    seed: int
    """From which each turn's seed is made."""

    async def sample_turn(
        self, prompt: Prompt, turn: int, max_tokens: int, stop: Sequence[str] = ()
    ) -> Trajectory:
        """Return a turn of the policy. stop: strings that end it beside the run's own."""
        seed = int(np.random.SeedSequence([self.seed, turn]).generate_state(1)[0])
        sampling = self.sampling
        if stop:
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *stop)})
        request = Request((prompt,), 1, sampling, seed, (max_tokens,))
        [sample] = await self.ask(request, self.episode)
        return sample


def add_figures(sums: dict[str, float], figures: Mapping[str, float]) -> None:
    """Add the figures of a turn to the sums of the episode."""
    for name, value in figures.items():
        sums[name] = sums.get(name, 0.0) + value


@dataclass
class _EpisodeRecord:
    """What is known of an episode while it is played, as it ends wherever its time is over."""

    branches: list[Conversation] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=lambda: {"environment_seconds": 0.0})

    async def measure(self, work: Awaitable[T]) -> T:
        """Return what the environment gives, and count its seconds."""
        start = time.monotonic()
        try:
            return await work
        finally:
            add_figures(self.figures, {"environment_seconds": time.monotonic() - start})


async def play(
    make_environment: Callable[[], EpisodeEnvironment],
    rules: EpisodeRules,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: EpisodePolicy,
) -> Trajectory:
    """Play an episode; return it with the environment's part of the reward.

    Raises EnvironmentFailed if the environment fails, and DataError if the chat template refuses
    what the environment says.
    """
    environment, record = make_environment(), _EpisodeRecord()
    try:
        try:
            async with asyncio.timeout(rules.config.episode_seconds):
                reason = await _play_turns(rules, prompt, group_seed, policy, environment, record)
        except TimeoutError:
            reason = "time"
        branches = [branch for branch in record.branches if branch.turns]
        if not branches:
            seconds = f"{rules.config.episode_seconds:g} s (episode_seconds)"
            raise EnvironmentFailed(Failed(f" had not begun after {seconds}", unanswered=True))
        reward = await record.measure(environment.reward())
        episode = build_trajectory(branches, sample_index, reason, reward, record.figures)
        return replace(episode, transcript=Transcript(environment.environment, record.messages))
    finally:
        await environment.close()


async def _play_turns(
    rules: EpisodeRules,
    prompt: Prompt,
    group_seed: int,
    policy: EpisodePolicy,
    environment: EpisodeEnvironment,
    record: _EpisodeRecord,
) -> FinishReason:
    config = rules.config
    begun = await record.measure(environment.reset(row_of(prompt, group_seed, rules.codec)))
    codec = rules.codec.with_tools(begun.tools) if config.describe_tools else rules.codec
    messages, first = _first_prompt(rules, codec, prompt, begun)
    max_tokens = len(first.tokens) + config.max_tokens
    record.branches.append(Conversation(first))
    for turn in range(1, config.max_turns + 1):
        conversation = record.branches[-1]
        asked = conversation.next_prompt()
        room = max_tokens - len(asked.tokens)
        max_new = min(prompt.max_new_tokens or policy.sampling.max_new_tokens, room)
        sample = await policy.sample_turn(asked, turn, max_new)
        reply = with_call_ids(codec.decode_reply(sample.response_tokens, begun.tools), turn)
        add_figures(record.figures, sample.figures)
        conversation = record.branches[-1] = conversation.add_sampled(sample, reply.problem or "")
        record.messages.append(render_message(reply.message))
        if sample.finish_reason == "length":
            return "length"
        answer = await record.measure(environment.step(reply))
        add_figures(record.figures, answer.figures)
        conversation = record.branches[-1] = conversation.with_turn_reward(answer.reward)
        if answer.done:
            return "stop"
        if turn == config.max_turns:
            return "turns"
        after = match_results([*map(codec.shorten, answer.messages)], reply.tool_calls)
        continued = _continue(conversation, config, codec, messages, reply, after, sample)
        if len(continued[-1].all_tokens) >= max_tokens:
            return "length"
        record.branches[-1:] = continued
        rendered = [*map(render_message, after)]
        record.messages += rendered
        messages = [*messages, render_message(reply.message), *rendered]
    raise AssertionError("max_turns is 1 or more")


def _continue(
    conversation: Conversation,
    config: EnvironmentConfig,
    codec: TurnCodec,
    messages: Sequence[Mapping[str, Any]],
    reply: Reply,
    answer: Sequence[Message],
    sample: Trajectory,
) -> list[Conversation]:
    """Return the conversation with the environment's answer.

    If the template writes earlier messages anew and the config says `branch`, return the
    conversation as it is, and another branch that begins with all messages.
    """
    if config.rewritten == "branch" and all(message.role != "raw" for message in answer):
        said, after = render_message(reply.message), [*map(render_message, answer)]
        if codec.is_rewritten(messages, said, after):
            anew = np.array(codec.encode_prompt([*messages, said, *after]), np.int32)
            return [conversation, Conversation(replace(conversation.prompt, tokens=anew))]
    tokens = codec.encode_answer(messages, reply, answer, sample.response_tokens)
    text = "\n".join(map(readable_text, answer))
    return [conversation.add_answer(answer[-1].role, tokens, text)]


def row_of(prompt: Prompt, seed: int, codec: TurnCodec) -> dict[str, Any]:
    """Return the row that an episode is about; the data's own columns win over the others."""
    return {
        "prompt": prompt.text,
        "prompt_text": codec.decode(prompt.tokens.tolist()),
        "messages": [*prompt.messages],
        "reference": prompt.reference,
        "reference_value": prompt.given_reference,
        "source": prompt.source,
        "seed": seed,
        **prompt.columns,
    }


def _first_prompt(
    rules: EpisodeRules, codec: TurnCodec, prompt: Prompt, begun: ResetResult
) -> tuple[list[Mapping[str, Any]], Prompt]:
    """Return the messages before the first turn, and the prompt that they are.

    A user's message of the environment is joined to the row's last one, and raw text follows as it
    is.
    """
    messages: list[Mapping[str, Any]] = [*prompt.messages]
    if not begun.messages and not codec.template.tools:
        return messages, prompt
    added = [codec.shorten(message) for message in begun.messages]
    if added and added[0].role == "raw":
        tokens = [*prompt.tokens.tolist(), *codec.encode(added[0].content)]
    else:
        for message in added:
            if messages and messages[-1]["role"] == message.role == "user":
                texts = filter(None, (messages[-1]["content"], message.content))
                messages[-1] = {**messages[-1], "content": "\n\n".join(texts)}
            else:
                messages.append(render_message(message))
        tokens = codec.encode_prompt(messages)
    if len(tokens) > rules.max_prompt_tokens:
        said = f"'s reset makes a prompt of {len(tokens)} tokens, and data.max_tokens is "
        raise EnvironmentFailed(Failed(f"{said}{rules.max_prompt_tokens}"))
    return messages, replace(prompt, tokens=np.array(tokens, np.int32))
