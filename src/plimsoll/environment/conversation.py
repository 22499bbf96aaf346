"""An episode's tokens, as they were sampled and as they were put between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from plimsoll.config.rl import ENVIRONMENT
from plimsoll.environment.calls import EnvironmentFailed, Rewarded
from plimsoll.records import FinishReason, Floats, Ints, Prompt, RewardPart, Trajectory, Turn
from plimsoll.reward.outcome import Failed


@dataclass(frozen=True)
class Conversation:
    """prompt: with the tokens that the first turn is sampled after. The rest is what follows it, as
    a `Trajectory` has it; columns by token as tuples and arrays of one length."""

    prompt: Prompt
    turns: tuple[Turn, ...] = ()
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    loss_mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens)

    @property
    def all_tokens(self) -> Ints:
        """With the prompt's."""
        return np.concatenate([self.prompt.tokens, self.tokens], dtype=np.int64)

    def asked(self) -> Prompt:
        """What the next turn is sampled after."""
        return replace(self.prompt, tokens=self.all_tokens)

    def said(self, answer: Trajectory, problem: str = "") -> Conversation:
        """The policy's turn, with the engine's own tokens."""
        sampled = np.asarray(answer.response_tokens, np.int64)
        turn = self._turn("assistant", sampled, answer.response_text, problem)
        return replace(
            self,
            turns=(*self.turns, turn),
            tokens=np.concatenate([self.tokens, sampled]),
            loss_mask=(*self.loss_mask, *[True] * len(sampled)),
            logprobs=(*self.logprobs, *answer.sampler_logprobs.tolist()),
            versions=(*self.versions, *answer.weight_versions.tolist()),
        )

    def told(self, role: str, tokens: Sequence[int] | Ints, text: str) -> Conversation:
        """What the environment said, with all that the template puts around it."""
        own = np.asarray(tokens, np.int64)
        nothing = [0] * len(own)
        return replace(
            self,
            turns=(*self.turns, self._turn(role, own, text)),
            tokens=np.concatenate([self.tokens, own]),
            loss_mask=(*self.loss_mask, *[False] * len(own)),
            logprobs=(*self.logprobs, *nothing),
            versions=(*self.versions, *nothing),
        )

    def rewarded(self, reward: float) -> Conversation:
        """The last turn of the policy's has this reward."""
        return replace(
            self, turns=(*self.turns[:-1], replace(self.turns[-1], reward=float(reward)))
        )

    def _turn(self, role: str, tokens: Ints, text: str, problem: str = "") -> Turn:
        end = self.length + len(tokens)
        return Turn(role, self.length, end, text, problem=problem)

    def rewards(self) -> Floats:
        """Of its turns, each at its last token; shape [R]."""
        rewards = np.zeros(self.length, np.float32)
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


def ended(
    branches: Sequence[Conversation],
    sample_index: int,
    finish_reason: FinishReason,
    whole: Rewarded,
    figures: Mapping[str, float],
) -> Trajectory:
    """The episode, of branches that each have a sampled token. whole: its reward, beside those of
    turns: at its last sampled token, or one for each.

    Raises EnvironmentFailed where that is another number of them.
    """
    rewards = [branch.rewards() for branch in branches]
    sampled = [np.flatnonzero(branch.loss_mask) for branch in branches]
    if isinstance(whole, tuple):
        count = sum(map(len, sampled))
        if len(whole) != count:
            said = f"'s get_reward gave {len(whole)} numbers for {count} sampled tokens"
            raise EnvironmentFailed(Failed(said))
        given = np.split(np.array(whole, np.float32), np.cumsum(list(map(len, sampled)))[:-1])
        for own, at, values in zip(rewards, sampled, given, strict=True):
            own[at] += values
    elif whole is not None:
        rewards[-1][sampled[-1][-1]] += whole
    total = float(np.concatenate(rewards).sum(dtype=np.float64))
    earlier = [
        branch.trajectory(sample_index, "stop", own)
        for branch, own in zip(branches[:-1], rewards, strict=False)
    ]
    parts = (RewardPart(ENVIRONMENT, total),)
    return branches[-1].trajectory(
        sample_index, finish_reason, rewards[-1], parts, figures, tuple(earlier)
    )
