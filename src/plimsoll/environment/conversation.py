"""An episode's tokens, as they were sampled and as they were put between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plimsoll.config.rl import ENVIRONMENT
from plimsoll.environment.calls import Rewarded
from plimsoll.records import FinishReason, Ints, Prompt, RewardPart, Trajectory, Turn


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

    def asked(self) -> Prompt:
        """What the next turn is sampled after."""
        tokens = np.concatenate([self.prompt.tokens, self.tokens]).astype(np.int64)
        return replace(self.prompt, tokens=tokens)

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

    def told(self, role: str, tokens: Sequence[int], text: str) -> Conversation:
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

    def trajectory(
        self,
        sample_index: int,
        finish_reason: FinishReason,
        whole: Rewarded,
        figures: Mapping[str, float],
    ) -> Trajectory:
        """whole: the reward of the episode, which comes beside those of turns: at its last sampled
        token, or one for each."""
        rewards = np.zeros(self.length, np.float32)
        for turn in self.turns:
            if turn.role == "assistant":
                rewards[turn.end - 1] += turn.reward
        sampled = np.flatnonzero(self.loss_mask)
        if isinstance(whole, tuple):
            rewards[sampled] += np.array(whole, np.float32)
        elif whole is not None:
            rewards[sampled[-1]] += whole
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
            (RewardPart(ENVIRONMENT, float(rewards.sum(dtype=np.float64))),),
            self.turns,
            rewards,
            figures,
        )
