"""Play an episode: the policy and the environment speak in turn until one of them is done.

Between the policy's turns stands the text that the chat template writes; it is never learned. An
episode ends when

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
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from plimsoll.data.continuation import following, is_rewritten
from plimsoll.environment.episode import (
    CallRefused,
    Episode,
    EpisodePolicy,
    EpisodeRules,
    add_figures,
)
from plimsoll.environment.local import EpisodeEnvironment
from plimsoll.environment.messages import (
    TurnCodec,
    match_results,
    readable_text,
    render_message,
    with_call_ids,
)
from plimsoll.environment.protocol import EnvironmentFailed, Message, Observation, Reply
from plimsoll.records import Prompt, TokenIds, Trajectory, Transcript
from plimsoll.reward.outcome import Failed

T = TypeVar("T")
Rendered = list[Mapping[str, Any]]
"""Messages as chat templates take them."""


async def play(
    make_environment: Callable[[], EpisodeEnvironment],
    rules: EpisodeRules,
    prompt: Prompt,
    group_seed: int,
    sample_index: int,
    policy: EpisodePolicy,
) -> Trajectory:
    """Play an episode; return its trajectory, with the environment's part of the reward.

    Raises EnvironmentFailed if the environment fails, and DataError if the chat template refuses
    the environment's messages.
    """
    environment, episode = make_environment(), Episode(rules, prompt, policy)
    episode.figures["environment_seconds"] = 0.0
    messages: Rendered = []
    try:
        try:
            async with asyncio.timeout(rules.config.episode_seconds):
                await _play_turns(environment, episode, episode.row(group_seed), messages)
        except TimeoutError:
            episode.reason = "time"
        if not episode.branches:
            seconds = f"{rules.config.episode_seconds:g} s (episode_seconds)"
            raise EnvironmentFailed(Failed(f" had not begun after {seconds}", unanswered=True))
        reward = await _measure(episode, environment.reward())
        trajectory = episode.trajectory(sample_index, reward, {})
        return replace(trajectory, transcript=Transcript(environment.environment, messages))
    finally:
        await environment.close()


async def _measure(episode: Episode, work: Awaitable[T]) -> T:
    """Return the result of `work`; add its seconds to the episode's `environment_seconds`."""
    start = time.monotonic()
    try:
        return await work
    finally:
        add_figures(episode.figures, {"environment_seconds": time.monotonic() - start})


async def _play_turns(
    environment: EpisodeEnvironment, episode: Episode, row: Mapping[str, Any], messages: Rendered
) -> None:
    """Sample turns and pass them to the environment until the episode is over.

    Args:
        environment: the environment.
        episode: the episode, whose turns are kept.
        row: the row that the episode is about.
        messages: is filled with the messages that follow the prompt.
    """
    config, codec = episode.rules.config, episode.rules.codec
    begun = await _measure(episode, environment.reset(row))
    if config.describe_tools:
        codec = codec.with_tools(begun.tools)
    first, prompt = _first_prompt(episode, codec, begun)
    episode.max_tokens = len(prompt) + config.max_tokens
    answer: list[Message] = []
    while True:
        try:
            sample = await episode.ask(prompt)
        except CallRefused:  # there is no room for another turn
            return
        role, text = answer[-1].role if answer else "", "\n".join(map(readable_text, answer))
        messages += map(render_message, answer)
        reply = with_call_ids(
            codec.decode_reply(sample.response_tokens, begun.tools), episode.turns
        )
        episode.keep(prompt, sample, role, text, reply.problem or "")
        before = [*first, *messages]
        messages.append(render_message(reply.message))
        if sample.finish_reason == "length":
            return
        result = await _measure(episode, environment.step(reply))
        add_figures(episode.figures, result.figures)
        episode.branches[-1] = episode.branches[-1].with_turn_reward(result.reward)
        if result.done:
            return
        if episode.turns == config.max_turns:
            episode.reason = "turns"
            return
        answer = match_results([*map(codec.shorten, result.messages)], reply.tool_calls)
        prompt = _next_prompt(episode, codec, before, reply, answer, sample)


def _next_prompt(
    episode: Episode,
    codec: TurnCodec,
    before: Rendered,
    reply: Reply,
    answer: Sequence[Message],
    sample: Trajectory,
) -> TokenIds:
    """Return the tokens after which the next turn is sampled.

    The tokens continue the last branch. Only if the template renders earlier messages differently
    now, and the config says `rewritten: branch`, is the whole conversation encoded anew.
    """
    new: Sequence[int] | TokenIds
    if raw := "".join(message.content for message in answer if message.role == "raw"):
        new = codec.encode(raw)
    else:
        turn, after = render_message(reply.message), [*map(render_message, answer)]
        branches = episode.rules.config.rewritten == "branch"
        if branches and is_rewritten(codec.template, before, turn, after):
            return np.array(codec.encode_prompt([*before, turn, *after]), np.int32)
        sampled = sample.response_tokens.tolist()
        new = following(codec.template, before, turn, after, sampled, codec.ends)
    return np.concatenate([episode.branches[-1].all_tokens, np.array(new, np.int32)])


def _first_prompt(
    episode: Episode, codec: TurnCodec, begun: Observation
) -> tuple[Rendered, TokenIds]:
    """Return the messages before the first turn, and their tokens.

    A user message of the environment is joined to the row's last message if that is a user message,
    too. Raw text follows the prompt without the template.
    """
    prompt, most = episode.prompt, episode.rules.max_prompt_tokens
    messages: Rendered = [*prompt.messages]
    if not begun.messages and not codec.template.tools:
        return messages, prompt.tokens
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
    if len(tokens) > most:
        why = f"'s reset makes a prompt of {len(tokens)} tokens, and data.max_tokens is "
        raise EnvironmentFailed(Failed(f"{why}{most}"))
    return messages, np.array(tokens, np.int32)
