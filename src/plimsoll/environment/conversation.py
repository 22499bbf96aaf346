"""An episode's tokens: the sampled ones, and the environment's answers between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from plimsoll.config.rl import ENVIRONMENT
from plimsoll.environment.protocol import EnvironmentFailed, EpisodeReward
from plimsoll.records import (
    FinishReason,
    Floats,
    Ints,
    Prompt,
    RewardPart,
    TokenIds,
    Trajectory,
    Turn,
)
from plimsoll.reward.outcome import Failed


@dataclass(frozen=True)
class Conversation:
    """A branch of an episode. All per-token fields have the same length, R."""

    prompt: Prompt
    """The prompt of the first turn. The other fields hold only what follows it."""
    turns: tuple[Turn, ...] = ()
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    loss_mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def all_tokens(self) -> Ints:
        """The prompt's tokens, then all tokens after the prompt."""
        return np.concatenate([self.prompt.tokens, self.tokens], dtype=np.int64)

    def add_sampled(self, sample: Trajectory, problem: str = "") -> Conversation:
        """Return the branch with a turn of the policy appended.

        `problem` says what is wrong with the turn's tool calls.
        """
        tokens = np.asarray(sample.response_tokens, np.int64)
        turn = self._turn("assistant", tokens, sample.response_text, problem)
        logprobs, versions = sample.sampler_logprobs.tolist(), sample.weight_versions.tolist()
        return self._extend(turn, tokens, True, logprobs, versions)

    def add_answer(self, role: str, tokens: Sequence[int] | TokenIds, text: str) -> Conversation:
        """Return the branch with an answer appended; `tokens` include the template's tokens."""
        added = np.asarray(tokens, np.int64)
        zeros = [0] * len(added)
        return self._extend(self._turn(role, added, text), added, False, zeros, zeros)

    def _extend(
        self,
        turn: Turn,
        tokens: Ints,
        learned: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> Conversation:
        return replace(
            self,
            turns=(*self.turns, turn),
            tokens=np.concatenate([self.tokens, tokens]),
            loss_mask=(*self.loss_mask, *[learned] * len(tokens)),
            logprobs=(*self.logprobs, *logprobs),
            versions=(*self.versions, *versions),
        )

    def with_turn_reward(self, reward: float) -> Conversation:
        """Return the conversation with a reward for its last turn."""
        turn = replace(self.turns[-1], reward=float(reward))
        return replace(self, turns=(*self.turns[:-1], turn))

    def _turn(self, role: str, tokens: Ints, text: str, problem: str = "") -> Turn:
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
            np.array(self.loss_mask, np.bool_),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int64),
            [turn.text for turn in self.turns if turn.role == "assistant"][-1],
            finish_reason,
            parts,
            self.turns,
            rewards,
            figures,
            earlier,
        )


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
    return branches[-1].trajectory(
        sample_index,
        finish_reason,
        rewards[-1],
        parts,
        {**_count_turns(branches), **figures},
        tuple(earlier),
    )


def _count_turns(branches: Sequence[Conversation]) -> dict[str, float]:
    turns = sum(turn.role == "assistant" for branch in branches for turn in branch.turns)
    return {"turns": turns, **({"branches": float(len(branches))} if len(branches) > 1 else {})}
