"""An episode: the rules of its environment, the policy, and the turns sampled so far.

Every turn's tokens are kept as they were sampled. A turn continues a branch if its prompt begins
with all tokens of that branch. The prompt's further tokens are an answer to the policy, and are
never learned from. Any other turn begins a new branch (`Trajectory.earlier`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.config.rl import ENVIRONMENT
from plimsoll.config.rollout import EnvironmentConfig, SamplingConfig
from plimsoll.data.continuation import following, is_rewritten
from plimsoll.data.pieces import Messages, Tools
from plimsoll.environment.messages import TurnCodec, render_message, say_the_same, with_call_ids
from plimsoll.environment.protocol import EnvironmentFailed, EpisodeReward, Reply
from plimsoll.environment.tool_calls import figures_of
from plimsoll.records import (
    TOKEN_REWARDS,
    Bools,
    Column,
    ExpertNumbers,
    FinishReason,
    Floats,
    Prompt,
    RewardPart,
    TokenColumns,
    TokenIds,
    Trajectory,
    Turn,
    hold_once,
)
from plimsoll.reward.outcome import Failed
from plimsoll.sampler.protocol import Ask, Request, derive_seeds


@dataclass(frozen=True)
class Conversation:
    """A branch of an episode. All per-token fields have the same length, R."""

    prompt: Prompt
    """The prompt of the first turn. The other fields hold only what follows it."""
    turns: tuple[Turn, ...] = ()
    tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    loss_mask: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    columns: TokenColumns = field(default_factory=dict)
    routing: ExpertNumbers | None = None
    """The experts of the first tokens, those of the prompt included; see `Trajectory`."""

    @property
    def all_tokens(self) -> TokenIds:
        """The prompt's tokens, then all tokens after the prompt."""
        return np.concatenate([self.prompt.tokens, self.tokens], dtype=np.int32)

    def add_sampled(self, sample: Trajectory, problem: str = "") -> Conversation:
        """Return the branch with a turn of the policy appended.

        `problem` says what is wrong with the turn's tool calls.
        """
        turn = self._turn("assistant", sample.response_tokens, sample.response_text, problem)
        extended = self._extend(turn, sample.response_tokens, True, sample.columns)
        return replace(extended, routing=_join_routing(self.routing, sample.routing))

    def add_answer(self, role: str, tokens: Sequence[int] | TokenIds, text: str) -> Conversation:
        """Return the branch with an answer appended; `tokens` include the template's tokens."""
        added = np.asarray(tokens, np.int32)
        return self._extend(self._turn(role, added, text), added, False, {})

    def _extend(
        self, turn: Turn, tokens: TokenIds, learned: bool, columns: TokenColumns
    ) -> Conversation:
        """Return the branch with a turn appended; tokens without a column have 0 in it."""

        def join(column: Column) -> NDArray[Any]:
            before = self.columns.get(column, np.zeros(len(self.tokens), column.dtype))
            after = columns.get(column, np.zeros(len(tokens), column.dtype))
            return np.concatenate([before, after])

        return replace(
            self,
            turns=(*self.turns, turn),
            tokens=np.concatenate([self.tokens, tokens]),
            loss_mask=np.concatenate([self.loss_mask, np.full(len(tokens), learned)]),
            columns={column: join(column) for column in {**self.columns, **columns}},
        )

    def with_turn_reward(self, reward: float) -> Conversation:
        """Return the conversation with a reward for its last turn."""
        turn = replace(self.turns[-1], reward=float(reward))
        return replace(self, turns=(*self.turns[:-1], turn))

    def _turn(self, role: str, tokens: TokenIds, text: str, problem: str = "") -> Turn:
        begin = len(self.tokens)
        return Turn(role, begin, begin + len(tokens), text, problem=problem)

    def turn_rewards(self) -> Floats:
        """Return each turn's reward at the turn's last token, 0 elsewhere; shape [R]."""
        rewards = np.zeros(len(self.tokens), np.float32)
        for turn in self.turns:
            if turn.role == "assistant":
                rewards[turn.end - 1] += turn.reward
        return rewards

    def trajectory(
        self,
        sample_index: int,
        finish_reason: FinishReason,
        rewards: Floats,
        parts: tuple[RewardPart, ...] = (),
        figures: Mapping[str, float] = MappingProxyType({}),
        earlier: tuple[Trajectory, ...] = (),
    ) -> Trajectory:
        """Return the branch as a trajectory; the arguments are fields of `Trajectory`."""
        return Trajectory(
            self.prompt,
            0,
            sample_index,
            self.tokens,
            hold_once(self.loss_mask),
            {**{c: hold_once(a) for c, a in self.columns.items()}, TOKEN_REWARDS: rewards},
            [turn.text for turn in self.turns if turn.role == "assistant"][-1],
            finish_reason,
            parts,
            self.turns,
            figures,
            earlier,
            routing=self.routing,
        )


def _join_routing(
    before: ExpertNumbers | None, sampled: ExpertNumbers | None
) -> ExpertNumbers | None:
    """Return a branch's experts after a turn, whose engine read the branch so far as its prompt.

    Tokens that had experts keep them: with these the tokens after them were sampled.
    """
    if before is None or sampled is None:
        return sampled if before is None else before
    return np.concatenate([before, sampled[len(before) :]])


def build_trajectory(
    branches: Sequence[Conversation],
    sample_index: int,
    finish_reason: FinishReason,
    reward: EpisodeReward,
    figures: Mapping[str, float],
) -> Trajectory:
    """Return the trajectory of an episode that is over.

    Raises EnvironmentFailed if `reward` is a tuple and has not one number for each sampled token.

    Args:
        branches: the branches, each with a sampled token. The last branch becomes the trajectory,
            the others its `earlier`.
        sample_index: see `Trajectory`.
        finish_reason: see `Trajectory`.
        reward: the episode's reward, in addition to the turns' rewards. A number is added at the
            last sampled token; a tuple has one number for each sampled token.
        figures: measurements by name; the counts of turns and branches are added.
    """
    rewards = [branch.turn_rewards() for branch in branches]
    sampled = [np.flatnonzero(branch.loss_mask) for branch in branches]
    if isinstance(reward, tuple):
        count = sum(map(len, sampled))
        if len(reward) != count:
            why = f"'s get_reward gave {len(reward)} numbers for {count} sampled tokens"
            raise EnvironmentFailed(Failed(why))
        shares = np.split(np.array(reward, np.float32), np.cumsum(list(map(len, sampled)))[:-1])
        for branch_rewards, places, values in zip(rewards, sampled, shares, strict=True):
            branch_rewards[places] += values
    elif reward is not None:
        rewards[-1][sampled[-1][-1]] += reward
    total = float(np.concatenate(rewards).sum(dtype=np.float64))
    earlier = [
        branch.trajectory(sample_index, "stop", branch_rewards)
        for branch, branch_rewards in zip(branches[:-1], rewards, strict=False)
    ]
    parts = (RewardPart(ENVIRONMENT, total),)
    turns = sum(turn.role == "assistant" for branch in branches for turn in branch.turns)
    counts: dict[str, float] = {"turns": turns}
    if len(branches) > 1:
        counts["branches"] = float(len(branches))
    return branches[-1].trajectory(
        sample_index,
        finish_reason,
        rewards[-1],
        parts,
        {**counts, **figures},
        tuple(earlier),
    )


@dataclass(frozen=True)
class EpisodeRules:
    """The settings that all episodes of one environment share."""

    name: str
    """The environment's name in the config."""
    config: EnvironmentConfig
    codec: TurnCodec
    max_prompt_tokens: int


@dataclass(frozen=True)
class EpisodePolicy:
    """The policy as one episode samples it."""

    ask: Ask
    """A function that sends a request to an engine and returns the samples."""
    episode: int
    """The episode's number; all its requests go to the same engine."""
    sampling: SamplingConfig
    seed: int
    """The episode's seed; each turn's seed is made from it."""


def add_figures(sums: dict[str, float], figures: Mapping[str, float]) -> None:
    """Add the figures of a turn to the sums of the episode."""
    for name, value in figures.items():
        sums[name] = sums.get(name, 0.0) + value


class CallRefused(Exception):
    """Raised if the episode is over or has no turn or room left; the text says which."""


@dataclass(frozen=True)
class EpisodeMessage:
    """A turn that `Episode.chat` sampled, with the messages and tools that it was given."""

    messages: Messages
    tools: Tools
    prompt: TokenIds
    """The tokens that the turn was sampled after."""
    reply: Reply
    sample: Trajectory


class Episode:
    """The state of an episode, and the turns that it samples."""

    def __init__(self, rules: EpisodeRules, prompt: Prompt, policy: EpisodePolicy) -> None:
        self.rules, self.prompt, self.policy = rules, prompt, policy
        self.max_tokens = rules.max_prompt_tokens + rules.config.max_tokens
        """The most tokens of prompt and episode together."""
        self.branches: list[Conversation] = []
        """The branches, in the order of their last turns."""
        self.reason: FinishReason = "stop"
        """Why the episode ended, once the agent is done."""
        self.figures: dict[str, float] = {}
        """The figures of all calls, added up by name."""
        self.turns = 0
        """The number of turns that were sampled."""
        self._over = False
        self._chats: list[EpisodeMessage] = []

    def row(self, seed: int) -> dict[str, Any]:
        """Return the data row of the episode, as environments and agents get it.

        A column of the data replaces a standard key of the same name.
        """
        prompt = self.prompt
        return {
            "prompt": prompt.text,
            "prompt_text": self.rules.codec.decode(prompt.tokens.tolist()),
            "messages": [*prompt.messages],
            "reference": prompt.reference,
            "reference_value": prompt.given_reference,
            "source": prompt.source,
            "seed": seed,
            **prompt.columns,
        }

    def end(self) -> None:
        """Refuse further calls."""
        self._over = True

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Trajectory:
        """Sample a turn after these tokens, add it to a branch and return it. Raises like `ask`."""
        sample = await self.ask(tokens, max_tokens, stop)
        self.keep(np.asarray(tokens, np.int32), sample, "user", None, "")
        return sample

    async def chat(
        self,
        messages: Messages,
        tools: Tools,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> EpisodeMessage:
        """Sample a turn after these messages, add it to a branch and return it.

        Raises like `ask`, and DataError if the chat template refuses the messages.
        """
        codec = self.rules.codec
        if self.rules.config.describe_tools:
            codec = codec.with_tools(tools)
        prompt, new_messages = self._encode(codec, messages, tools)
        sample = await self.ask(prompt, max_tokens, stop)
        reply = with_call_ids(codec.decode_reply(sample.response_tokens, tools), self.turns)
        text = "\n".join(str(message["content"]) for message in new_messages)
        self.keep(prompt, sample, str(new_messages[-1]["role"]), text, reply.problem or "")
        turn = EpisodeMessage(messages, tools, prompt, reply, sample)
        self._chats.append(turn)
        if tools:
            add_figures(self.figures, figures_of(reply))
        return turn

    async def ask(
        self,
        tokens: Sequence[int] | TokenIds,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Trajectory:
        """Sample a turn after these tokens and return it; no branch gets it.

        `stop` adds to the run's stop strings.

        Raises CallRefused if the episode is over, or has no turn or room left. In the last two
        cases `reason` is set.
        """
        config = self.rules.config
        if self._over:
            raise CallRefused("The episode is over.")
        if self.turns == config.max_turns:
            self.reason = "turns"
            raise CallRefused(f"The episode has had its max_turns, {config.max_turns}.")
        if len(tokens) >= self.max_tokens:
            self.reason = "length"
            raise CallRefused(
                f"{len(tokens)} tokens leave no room for a turn: data.max_tokens + "
                f"environments.{self.rules.name}.max_tokens is {self.max_tokens}."
            )
        self.turns += 1
        policy, sampling = self.policy, self.policy.sampling
        most = self.prompt.max_new_tokens or sampling.max_new_tokens
        room = min(most, max_tokens or most, self.max_tokens - len(tokens))
        prompt = replace(self.prompt, tokens=np.asarray(tokens, np.int32))
        if stop:
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *stop)})
        [seed] = derive_seeds([policy.seed, self.turns], 1)
        [sample] = await policy.ask(Request((prompt,), 1, sampling, seed, (room,)), policy.episode)
        add_figures(self.figures, sample.figures)
        return sample

    def _encode(
        self, codec: TurnCodec, messages: Messages, tools: Tools
    ) -> tuple[TokenIds, Messages]:
        """Return the tokens of a conversation up to the next turn, and its new messages.

        Sampled turns are not rendered again: the tokens continue those of the longest earlier call
        that the conversation goes on from.
        """
        continued = [chat for chat in self._chats if _continues(messages, tools, chat)]
        chat = max(reversed(continued), key=lambda chat: len(chat.messages), default=None)
        if chat is not None:
            before, reply = chat.messages, messages[len(chat.messages)]
            after = messages[len(before) + 1 :]
            branches = self.rules.config.rewritten == "branch"
            if not (branches and is_rewritten(codec.template, before, reply, after)):
                sampled = chat.sample.response_tokens
                tokens = sampled.tolist()
                new = following(codec.template, before, reply, after, tokens, codec.ends)
                return np.concatenate([chat.prompt, sampled, new], dtype=np.int32), after
        return np.array(codec.encode_prompt(messages), np.int32), messages

    def keep(
        self, prompt: TokenIds, sample: Trajectory, role: str, text: str | None, problem: str
    ) -> None:
        """Add a turn to the longest branch that its prompt continues, or to a new branch.

        `role` is the side that wrote the new part of the prompt, and `text` its text (None: decode
        the new tokens). `problem` says what is wrong with the turn's tool calls.
        """
        continued = [branch for branch in self.branches if _begins(prompt, branch.all_tokens)]
        branch = max(continued, key=lambda branch: len(branch.all_tokens), default=None)
        if branch is None:
            extended = Conversation(replace(self.prompt, tokens=prompt))
        else:
            self.branches = [kept for kept in self.branches if kept is not branch]
            new, extended = prompt[len(branch.all_tokens) :], branch
            if len(new):
                new_text = self.rules.codec.decode(new.tolist()) if text is None else text
                extended = branch.add_answer(role, new, new_text)
        self.branches.append(extended.add_sampled(sample, problem))
        self.reason = "length" if sample.finish_reason == "length" else "stop"

    def trajectory(
        self, sample_index: int, reward: EpisodeReward, figures: Mapping[str, float]
    ) -> Trajectory:
        """Return the episode, which has a turn, as a trajectory with these further figures."""
        figures = {**self.figures, **figures}
        return build_trajectory(self.branches, sample_index, self.reason, reward, figures)


def _begins(tokens: TokenIds, beginning: TokenIds) -> bool:
    return len(tokens) >= len(beginning) and np.array_equal(tokens[: len(beginning)], beginning)


def _continues(messages: Messages, tools: Tools, chat: EpisodeMessage) -> bool:
    """Return whether the messages begin with an earlier call's messages and its reply."""
    reply: Mapping[str, Any] = render_message(chat.reply.message)
    return (
        len(messages) > len(chat.messages) + 1
        and [*tools] == [*chat.tools]
        and all(map(say_the_same, messages, (*chat.messages, reply)))
    )
