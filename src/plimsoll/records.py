"""The records that cross rooms: what a row, a trajectory and a micro-batch are.

Plain numpy, no torch, so that any process may hold them and Ray moves them without a copy.

Shape suffixes used in the whole project:

| suffix | meaning |
| --- | --- |
| `_B` | prompts of a batch |
| `_G` | responses of one prompt (a group) |
| `_S` | sequences of a pack |
| `_P` | pairs of sequences (chosen and rejected) |
| `_T` | packed tokens of a pack |
| `_L` | learned tokens of a pack: the targets that reach the head, in packed order |
| `_V` | vocabulary |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
TokenIds = NDArray[np.integer[Any]]
"""Tokens by their numbers: int32 in data, as a run holds all its rows; int64 in packs."""
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "turns", "time"]
"""Why an episode ended: by itself; at its longest; after its last turn; at its time limit."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to sample from.

    index: the row's number in the data (of several sources, the place among all their prompts),
        the same in every epoch and after a resume.
    tokens: the prompt after the chat template, ready for the engine, shape [P].
    text: the prompt as a person reads it (before the template).
    reference: the reference answer as text, where the data has one.
    source: what its row is of: the name of one of several sources in the config, or what the row
        itself says; empty of a single source.
    columns: what else its row holds, for rewards and environments: text, numbers, true and false,
        lists and objects of these, by the columns' names.
    messages: the conversation before the template, for who renders it by another.
    max_new_tokens: the longest response to it, where it has a limit of its own.
    order_by: a number that the prompts of its source are drawn by, the lowest first.
    environment: the name of its own in the config, where there are several.
    is_text: whether its row holds it as text, not as messages.
    reference_value: the reference as the row has it, where that is no text: a number, true or
        false, a list or an object.
    """

    index: int
    tokens: TokenIds
    text: str
    reference: str | None = None
    source: str = ""
    columns: Mapping[str, object] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    max_new_tokens: int | None = None
    order_by: float | None = None
    environment: str = ""
    is_text: bool = False
    reference_value: object = None

    @property
    def given_reference(self) -> object:
        """The reference as the row has it, for functions that other systems call so; None without
        one."""
        return self.reference if self.reference_value is None else self.reference_value


@dataclass(frozen=True)
class RewardPart:
    """One named part of a trajectory's reward; the reward is the sum of value * weight."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said in an episode of several turns.

    role: `assistant` for what was sampled; else who answered, such as `tool` or `user`.
    begin, end: its tokens are response_tokens[begin:end], with what the chat template puts around
        them.
    text: as a person reads it.
    reward: that the environment gave for it.
    problem: what is wrong with a tool call in it.
    """

    role: str
    begin: int
    end: int
    text: str
    reward: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Transcript:
    """What is left of an episode with an environment until it is scored, in the process that it was
    played in. environment: the object; None: it is in another process, or an agent played it.
    messages: that followed the prompt, as chat templates take them; of an agent by their texts."""

    environment: object
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Trajectory:
    """One sampled episode; a response to a prompt is the special case of one turn.

    group: the trajectories of one prompt in one step share it, and no others do; a prompt that
        comes twice in a step has two.
    sample_index: which of its group this is, 0 <= sample_index < group size.
    response_tokens: all that follows the prompt, shape [R].
    loss_mask: True where a token was sampled, and so can be learned; shape [R].
    sampler_logprobs: of the distribution that was sampled from (after temperature), by the engine
        that sampled; 0 where a token was not sampled; shape [R].
    weight_versions: of the weights that sampled each token; shape [R].
    response_text: what was sampled; of several turns the last thing.
    turns: of an episode with an environment, in their order; they cover all tokens.
    token_rewards: what an environment gave for single tokens, shape [R]; None: it gave one number.
    figures: what an environment measured of it, such as seconds, by name.
    earlier: of an episode in which what came before was written anew, or which went on from an
        earlier place: its branches before this one, each with the prompt that it began with. A
        sampled token is learned in the branch that it was sampled in. Rewards of the whole episode
        are this one's.
    transcript: of an episode, for rewards that look at it; never written.
    """

    prompt: Prompt
    group: int
    sample_index: int
    response_tokens: Ints
    loss_mask: Bools
    sampler_logprobs: Floats
    weight_versions: Ints
    response_text: str
    finish_reason: FinishReason
    rewards: tuple[RewardPart, ...] = ()
    turns: tuple[Turn, ...] = ()
    token_rewards: Floats | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    earlier: tuple[Trajectory, ...] = ()
    transcript: Transcript | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        per_token = (self.loss_mask, self.sampler_logprobs, self.weight_versions)
        for own in (*per_token, *([] if self.token_rewards is None else [self.token_rewards])):
            assert own.shape == self.response_tokens.shape

    @property
    def reward(self) -> float:
        """The scalar reward: the weighted sum of the parts."""
        return sum(part.value * part.weight for part in self.rewards)

    def part(self, name: str) -> float:
        """Return the value of the part of the reward that has this name."""
        return next(part.value for part in self.rewards if part.name == name)

    @property
    def branches(self) -> tuple[Trajectory, ...]:
        """All of the episode's, in the order in which they were sampled."""
        return (*self.earlier, self)


def single_turn(
    prompt: Prompt,
    sample_index: int,
    response_tokens: Ints,
    sampler_logprobs: Floats,
    response_text: str,
    finish_reason: FinishReason,
    weight_version: int,
    rewards: tuple[RewardPart, ...] = (),
    *,
    group: int = 0,
) -> Trajectory:
    """A response, all of whose tokens were sampled with weights of one version."""
    shape = response_tokens.shape
    return Trajectory(
        prompt,
        group,
        sample_index,
        response_tokens,
        np.ones(shape, np.bool_),
        sampler_logprobs,
        np.full(shape, weight_version, np.int64),
        response_text,
        finish_reason,
        rewards,
    )


class Row(Protocol):
    """What a job learns from: one sequence, or several that stay together."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Its sequences; of a pair the chosen one first."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence.

    tokens: shape [n]. loss_mask: shape [n], True where the token is to be learned; the first
    token can never be (nothing predicts it).
    """

    tokens: TokenIds
    loss_mask: Bools

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape and self.tokens.ndim == 1
        assert len(self.tokens) > 0 and not self.loss_mask[0]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class Pair:
    """A better and a worse response to the same prompt; each sample holds the prompt too, of which
    nothing is learned. margin: by how much the better one's score should be ahead. prompt: a number
    that rows of the same prompt share."""

    chosen: Sample
    rejected: Sample
    margin: float = field(default=0.0, kw_only=True)
    prompt: int = field(default=0, kw_only=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True)
class LabelledResponse:
    """A response that is desirable or undesirable by itself; the sample holds the prompt too, of
    which nothing is learned. prompt: as in `Pair`."""

    sample: Sample
    desirable: bool
    prompt: int = field(default=0, kw_only=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self.sample,)


@dataclass(frozen=True)
class LabelledSteps:
    """A response in steps. sample: what is marked as learned is each step's last token, at which
    its score is read. labels: one for each step, from 0 (wrong) to 1 (right). prompt: as in
    `Pair`."""

    sample: Sample
    labels: Floats
    prompt: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        assert self.labels.shape == (int(self.sample.loss_mask.sum()),)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self.sample,)


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    """The sequences of all rows, row by row."""
    return [sample for row in rows for sample in row.samples]


@dataclass(frozen=True)
class Pack:
    """One micro-batch: whole sequences side by side, no padding, within a token budget.

    Worked example: the sequences [a b c] (b, c learned) and [d e] (e learned) give
    tokens_T = [a b c d e], positions_T = [0 1 2 0 1], cu_seqlens = [0 3 5],
    predictor_L = [0 1 3] (the hidden states at a, b and d predict b, c and e),
    targets_L = [b c e], cu_loss_tokens = [0 2 3].

    Sequences may share how they begin: of [a b c] and [a b f] (c, f learned) the second adds only
    f, at position 2, and b predicts both: tokens_T = [a b c f], positions_T = [0 1 2 2],
    cu_seqlens = [0 3 4], shared_S = [0 2], predictor_L = [1 1].

    cu_seqlens: the borders of the tokens that the pack holds for each sequence.
    shared_S: how many tokens come before these, the first ones of the nearest sequence before that
        shares none; 0 for a sequence that is whole by itself.
    samples_S: which sample of the batch each sequence is; -1 for a filler, a sequence without
        learned tokens that only keeps the number of micro-batches equal on every rank.
    """

    tokens_T: Ints
    positions_T: Ints
    cu_seqlens: NDArray[np.int32]
    shared_S: Ints
    predictor_L: Ints
    targets_L: Ints
    cu_loss_tokens: NDArray[np.int32]
    samples_S: Ints

    @property
    def tokens(self) -> int:
        """How many tokens the pack holds (T)."""
        return len(self.tokens_T)

    @property
    def loss_tokens(self) -> int:
        """How many of them are learned (L)."""
        return len(self.targets_L)


@dataclass(frozen=True)
class BatchCounts:
    """What one optimizer step sees over all ranks: losses are divided by these, never by a
    micro-batch's own count, so no split into micro-batches or ranks can change the gradient.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> BatchCounts:
        """Of a step that learns from these samples."""
        return cls(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples))


def leaders(shared_S: Ints) -> Ints:
    """For each sequence of a pack, which sequence its first tokens are of: itself, or the nearest
    one before it that shares none."""
    return np.maximum.accumulate(np.where(shared_S == 0, np.arange(len(shared_S)), 0))


def to_packed(pack: Pack, per_sample: Sequence[Floats]) -> Floats:
    """Lay per-sample arrays (one number per learned token) out in the pack's order, _L."""
    pieces = [per_sample[sample] for sample in pack.samples_S if sample >= 0]
    flat_L = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
    assert len(flat_L) == pack.loss_tokens
    return flat_L.astype(np.float32, copy=False)


def from_packed(packs: Sequence[Pack], values: Sequence[Floats], samples: int) -> list[Floats]:
    """The inverse of `to_packed` over several packs: one array per sample, in batch order."""
    found: list[Floats | None] = [None] * samples
    for pack, values_L in zip(packs, values, strict=True):
        assert len(values_L) == pack.loss_tokens
        for i, sample in enumerate(pack.samples_S):
            if sample >= 0:
                found[sample] = values_L[pack.cu_loss_tokens[i] : pack.cu_loss_tokens[i + 1]]
    missing = [i for i, array in enumerate(found) if array is None]
    assert not missing, f"samples {missing} are in no pack"
    return [array for array in found if array is not None]
