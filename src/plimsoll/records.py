"""The records that all packages share: prompts, trajectories, training rows and micro-batches.

They hold numpy arrays and no torch, so that any process can use them and Ray moves them without a
copy.

Shape suffixes used in the whole project:

| suffix | meaning |
| --- | --- |
| `_B` | prompts of a batch |
| `_G` | responses of one prompt (a group) |
| `_S` | sequences of a pack |
| `_P` | pairs of sequences (chosen and rejected) |
| `_T` | packed tokens of a pack |
| `_L` | learned tokens of a pack: the tokens with a loss, in packed order |
| `_V` | vocabulary |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
TokenIds = NDArray[np.integer[Any]]
"""Token ids: int32 wherever many are held; a rank makes int64 of a micro-batch's for torch."""
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
ExpertNumbers = NDArray[np.integer[Any]]
"""The numbers of experts, [tokens, layers, k]: uint8 for up to 255 in a layer, int16 for more."""

ExtractedCalls = tuple[str, Sequence[tuple[str, str, str]], Sequence[str]]
"""Three parts: the text outside of tool calls; for each call its name, its arguments as JSON text
and its id ("" if it has none); and a sentence for each call that cannot be parsed."""
ExtractCalls = Callable[[str, Sequence[Mapping[str, Any]]], ExtractedCalls]
"""A function that finds tool calls in a text, given the tools' schemas; it never raises.

Each format of tool calls has such a function."""

FinishReason = Literal["stop", "length", "turns", "time"]
"""Why an episode ended: by itself, or at its limit of length, turns or time."""


ColumnLayout = Literal["L", "S"]
"""Whether numbers belong to the learned tokens or to the sequences of a pack."""


@dataclass(frozen=True, slots=True)
class Column:
    """A kind of number that the tokens or the sequences of a batch have beside their ids.

    A column is declared once, as a value. All code that cuts, joins, sends, checks, writes or reads
    columns does so for every column alike; only code that computes or uses the numbers names one.

    A column has three forms. A trajectory has one number for each response token, shape [R]; tokens
    that were not sampled have 0. A batch has one entry for each sample: an array of the numbers of
    the sample's learned tokens, or a number. A pack has the entries of its sequences, joined.

    Attributes:
        name: The column's name in files; no other column has it.
        layout: What the numbers belong to.
        dtype: The type of the numbers.
        what: The numbers, as messages call them.
        sampled: Whether the numbers come with the tokens, from a sampler or an environment; else
            the trainer computes them.
        in_policy_loss: Whether the policy loss gets the column.
    """

    name: str
    layout: ColumnLayout = "L"
    dtype: str = "float32"
    what: str = ""
    sampled: bool = False
    in_policy_loss: bool = False

    def cut(self, entries: Entries, pack: Pack) -> NDArray[Any]:
        """Return the entries of a pack's sequences, joined; a filler has no entry."""
        own = [entries[i] for i in pack.samples_S if i >= 0]
        if self.layout == "S":
            return np.array(own, self.dtype)
        cut_L = np.concatenate([np.zeros(0, self.dtype), *own], dtype=self.dtype)
        assert len(cut_L) == pack.loss_tokens, f"{self.name} is not of these samples"
        return cut_L


TokenColumns = Mapping[Column, NDArray[Any]]
"""A number for each response token of a trajectory, shape [R], by column."""
Entries = Sequence[Any] | NDArray[Any]
"""The entry of each sample of a batch in one column."""
BatchColumns = Mapping[Column, Entries]
"""The entries of a batch's samples by column."""
PackColumns = Mapping[Column, Any]
"""For each column the entries of a pack's sequences, joined; or what stays on a rank."""

SAMPLER_LOGPROBS = Column(
    "sampler_logprobs", what="the sampler's log-probs", sampled=True, in_policy_loss=True
)
"""The sampler's log-prob (nats) of each sampled token under the distribution from which it was
sampled (after temperature)."""
WEIGHT_VERSIONS = Column("weight_versions", dtype="int32", what="the weight versions", sampled=True)
"""The version of the weights that sampled each token."""
TOKEN_REWARDS = Column("token_rewards", what="the rewards of tokens", sampled=True)
"""Rewards that an environment gave for single tokens; absent if it gave one number."""
TRAINER_LOGPROBS = Column("trainer_logprobs", what="the actor's log-probs", in_policy_loss=True)
"""The log-probs (nats) under the old policy, by the trainer.

Absent in a step with a single update, where the policy that learns still is the old policy (see
`RunSpec.scores_before_learning`)."""
REFERENCE_LOGPROBS = Column(
    "reference_logprobs", what="the reference's log-probs", in_policy_loss=True
)
"""Log-probs (nats) under the reference."""
VALUES = Column("values", what="the critic's values")
"""The critic's values before the step."""
TEACHER_LOGPROBS = Column("teacher_logprobs", what="the teacher's log-probs")
"""Log-probs (nats) under a teacher; absent if the actor learns from whole distributions."""
ADVANTAGES = Column("advantages", what="the advantages", in_policy_loss=True)
"""The advantages, for the policy loss."""
RETURNS = Column("returns", what="the returns")
"""The targets of the value loss."""
COLUMNS = {value.name: value for value in [*globals().values()] if isinstance(value, Column)}
"""All columns above by their names: those of trajectories, in files too."""
SAMPLED = [column for column in COLUMNS.values() if column.sampled]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to sample from.

    Attributes:
        index: The row's number in the data (with several sources, the number among all their
            prompts). It is the same in every epoch and after a resume.
        tokens: The prompt after the chat template, ready for the engine; shape [P].
        text: The prompt as a person reads it (before the template).
        reference: The reference answer as text, or None if the data has none.
        source: The name of the source in the config if there are several, or the name that the row
            itself gives; empty for a single source.
        columns: Everything else in the row, by column name, for rewards and environments: text,
            numbers, true and false, and lists and objects of these.
        named: The values of the columns that settings name, such as the reference's, by their own
            names.
        messages: The conversation before the template, for code that renders it with another
            template.
        max_new_tokens: The longest response to this prompt, or None if it has no limit of its own.
        order_by: The sort key within the source: prompts are drawn in ascending order of it.
        environment: The name of the prompt's environment in the config, if there are several.
        is_text: Whether the row holds the prompt as text, not as messages.
        reference_value: The reference as the row has it, if that is no text: a number, true or
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
    named: Mapping[str, object] = field(default_factory=dict)

    @property
    def given_reference(self) -> object:
        """The reference with the type that it has in the row; None if there is no reference."""
        return self.reference if self.reference_value is None else self.reference_value


@dataclass(frozen=True)
class RewardPart:
    """One named part of a trajectory's reward; the reward is the sum of value * weight."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's message in an episode of several turns.

    Attributes:
        role: `assistant` for sampled tokens; else the side that answered, such as `tool` or `user`.
        begin: The index in `response_tokens` of the turn's first token, template tokens included.
        end: The index after the turn's last token.
        text: The message as a person reads it.
        reward: The reward that the environment gave for the turn.
        problem: What is wrong with a tool call in the turn; empty if nothing is.
    """

    role: str
    begin: int
    end: int
    text: str
    reward: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Transcript:
    """The messages of an episode with an environment, kept in the process that played it.

    A transcript lives until the episode is scored.

    Attributes:
        environment: The environment object, or None if it is in another process or an agent played
            the episode.
        messages: The messages that followed the prompt, as chat templates take them; for an agent,
            their texts.
    """

    environment: object
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Trajectory:
    """One sampled episode; a response to a prompt is the special case of one turn.

    Attributes:
        group: The number of the group: the trajectories of one prompt in one step. A prompt that
            comes twice in a step has two groups.
        sample_index: The number within the group, 0 <= sample_index < group size.
        response_tokens: All tokens that follow the prompt, int32, shape [R].
        loss_mask: True for tokens that were sampled, and so can be learned; shape [R].
        columns: The numbers of the tokens, shape [R] each. Sampled ones always have
            `SAMPLER_LOGPROBS` and `WEIGHT_VERSIONS`.
        response_text: The sampled text; with several turns, the text of the last turn.
        turns: The turns of an episode with an environment, in order; they cover all tokens.
        figures: Measurements by an environment, such as seconds, by name.
        earlier: The branches before this one, each with its prompt. A new branch begins if the
            history was rewritten or the episode went on from an earlier place. A sampled token is
            learned in the branch in which it was sampled. The last branch gets the rewards of the
            whole episode.
        transcript: The messages, for rewards that read them; never written to a file.
        routing: The experts that the engine took for the first tokens of prompt and response, shape
            [n, layers, k]; n is at most their number. The last sampled token has none, as the
            engine never reads it. None if the engine returns none.
    """

    prompt: Prompt
    group: int
    sample_index: int
    response_tokens: TokenIds
    loss_mask: Bools
    columns: TokenColumns
    response_text: str
    finish_reason: FinishReason
    rewards: tuple[RewardPart, ...] = ()
    turns: tuple[Turn, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    earlier: tuple[Trajectory, ...] = ()
    transcript: Transcript | None = field(default=None, compare=False, repr=False)
    routing: ExpertNumbers | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for array in (self.loss_mask, *self.columns.values()):
            assert array.shape == self.response_tokens.shape

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields as they cross to another process: mask and versions as runs."""
        columns = {column: to_runs(array) for column, array in self.columns.items()}
        return {**self.__dict__, "loss_mask": to_runs(self.loss_mask), "columns": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {column: from_runs(value) for column, value in state["columns"].items()}
        self.__dict__.update(state, loss_mask=from_runs(state["loss_mask"]), columns=columns)

    @property
    def reward(self) -> float:
        """The scalar reward: the weighted sum of the parts."""
        return sum(part.value * part.weight for part in self.rewards)

    def part(self, name: str) -> float:
        """Return the value of the part of the reward that has this name."""
        return next(part.value for part in self.rewards if part.name == name)

    @property
    def branches(self) -> tuple[Trajectory, ...]:
        """All branches of the episode, in the order in which they were sampled."""
        return (*self.earlier, self)

    @property
    def sampler_logprobs(self) -> Floats:
        """The column `SAMPLER_LOGPROBS`."""
        return self.columns[SAMPLER_LOGPROBS]

    @property
    def weight_versions(self) -> NDArray[np.int32]:
        """The column `WEIGHT_VERSIONS`."""
        return self.columns[WEIGHT_VERSIONS]

    @property
    def token_rewards(self) -> Floats | None:
        """The column `TOKEN_REWARDS`, or None."""
        return self.columns.get(TOKEN_REWARDS)

    def change_branches(self, change: Callable[[Trajectory], Trajectory]) -> Trajectory:
        """Return the episode with each branch changed by a function."""
        *earlier, last = map(change, self.branches)
        return replace(last, earlier=tuple(earlier))

    def learned(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers of the learned tokens, given those of all; no copy if all learn."""
        return values if self.loss_mask.all() else values[self.loss_mask]

    def spread(self, learned: NDArray[Any]) -> NDArray[Any]:
        """Return a number for each token, given those of the learned tokens; others have 0.

        The inverse of `learned`.
        """
        if self.loss_mask.all():
            return learned
        values = np.zeros(self.loss_mask.shape, learned.dtype)
        values[self.loss_mask] = learned
        return values

    def add_columns(self, columns: TokenColumns) -> Trajectory:
        """Return the branch with further columns, or with others of the same names."""
        return replace(self, columns={**self.columns, **columns})


def single_turn(
    prompt: Prompt,
    sample_index: int,
    response_tokens: TokenIds,
    sampler_logprobs: Floats,
    response_text: str,
    finish_reason: FinishReason,
    weight_version: int,
    rewards: tuple[RewardPart, ...] = (),
    *,
    group: int = 0,
) -> Trajectory:
    """Return a response as a trajectory; all its tokens were sampled by one version of weights.

    Its mask and versions are read-only arrays that hold their number once.
    """
    shape = response_tokens.shape
    return Trajectory(
        prompt,
        group,
        sample_index,
        response_tokens.astype(np.int32, copy=False),
        np.broadcast_to(True, shape),
        {
            SAMPLER_LOGPROBS: sampler_logprobs,
            WEIGHT_VERSIONS: np.broadcast_to(np.int32(weight_version), shape),
        },
        response_text,
        finish_reason,
        rewards,
    )


def unrouted_number(itemsize: int) -> int:
    """Return the number that marks a token without experts, in integers of so many bytes."""
    return 255 if itemsize == 1 else -1


def as_experts(numbers: NDArray[Any], experts: int) -> ExpertNumbers:
    """Return the numbers of experts as `ExpertNumbers`; `experts`: how many a layer has."""
    return numbers.astype(np.uint8) if experts <= unrouted_number(1) else numbers.astype(np.int16)


def to_runs(array: NDArray[Any]) -> NDArray[Any] | tuple[NDArray[Any], Ints]:
    """Return the value and the length of each run of equal whole numbers or truth values.

    [1 1 1 2] gives ([1 2], [3 1]). An array of other numbers is returned as it is.
    """
    if array.dtype.kind == "f":
        return array
    starts = np.flatnonzero(np.concatenate([[len(array) > 0], array[1:] != array[:-1]]))
    return array[starts], np.diff(starts, append=len(array))


def from_runs(runs: NDArray[Any] | tuple[NDArray[Any], Ints]) -> NDArray[Any]:
    """Return the array that `to_runs` got; if it is one run, it holds its number once."""
    if not isinstance(runs, tuple):
        return runs
    values, lengths = runs
    if len(values) == 1:
        return np.broadcast_to(values[0], lengths)
    return np.repeat(values, lengths)


def hold_once(array: NDArray[Any]) -> NDArray[Any]:
    """Return an equal array that holds its number once, if it has a single whole number or truth.

    Such an array is read-only. Any other array is returned as it is.
    """
    return from_runs(to_runs(array))


class Row(Protocol):
    """A unit of training data: one sequence, or several that stay together."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The row's sequences; for a pair, the chosen one first."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence.

    Attributes:
        tokens: The token ids, shape [n].
        loss_mask: True for tokens that are learned, shape [n]. It is False for the first token,
            which nothing predicts.
        routing: The experts of the first tokens; see `Trajectory`.
    """

    tokens: TokenIds
    loss_mask: Bools
    routing: ExpertNumbers | None = None

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape and self.tokens.ndim == 1
        assert len(self.tokens) > 0 and not self.loss_mask[0]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The sample itself, as the only sequence of its row."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Pair:
    """A better and a worse response to the same prompt.

    Each sample begins with the prompt, which is not learned.

    Attributes:
        margin: How much higher the score of the better response should be.
        prompt: A number that rows of the same prompt share.
    """

    chosen: Sample
    rejected: Sample
    margin: float = field(default=0.0, kw_only=True)
    prompt: int = field(default=0, kw_only=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The chosen sequence, then the rejected one."""
        return (self.chosen, self.rejected)


@dataclass(frozen=True)
class LabelledResponse:
    """A response that is desirable or undesirable by itself.

    The sample begins with the prompt, which is not learned.

    Attributes:
        prompt: A number that rows of the same prompt share.
    """

    sample: Sample
    desirable: bool
    prompt: int = field(default=0, kw_only=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The one sequence of the row."""
        return (self.sample,)


@dataclass(frozen=True)
class LabelledSteps:
    """A response whose text is divided into steps of a solution, each with a label.

    Attributes:
        sample: The sequence. Its loss_mask marks the last token of each step, whose score is
            compared with the label.
        labels: One label for each step, from 0 (wrong) to 1 (right).
        prompt: A number that rows of the same prompt share.
    """

    sample: Sample
    labels: Floats
    prompt: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        assert self.labels.shape == (int(self.sample.loss_mask.sum()),)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The one sequence of the row."""
        return (self.sample,)


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    """Return the sequences of all rows, row by row."""
    return [sample for row in rows for sample in row.samples]


@dataclass(frozen=True)
class Pack:
    """One micro-batch: complete sequences one after another, no padding, within a token budget.

    Worked example: the sequences [a b c] (b, c learned) and [d e] (e learned) give
    tokens_T = [a b c d e], learned_T = [0 1 1 0 1], cu_seqlens = [0 3 5], cu_loss_tokens = [0 2 3].
    A rank computes from these positions_T = [0 1 2 0 1], predictor_L = [0 1 3] (the hidden states
    at a, b and d predict b, c and e) and targets_L = [b c e].

    Sequences may share their first tokens. Example: [a b c] and [a b f] (c and f learned). The
    second sequence adds only f, at position 2, and b predicts both c and f: tokens_T = [a b c f],
    positions_T = [0 1 2 2], cu_seqlens = [0 3 4], shared_S = [0 2], predictor_L = [1 1].

    Attributes:
        learned_bits: `learned_T` as `np.packbits` gives it, a bit for each token.
        cu_seqlens: The borders in tokens_T between sequences, without shared tokens.
        shared_S: The number of first tokens that each sequence shares with its leader: the nearest
            sequence before it that shares none. 0 if the pack holds all tokens of the sequence.
        samples_S: The index in the batch of each sequence's sample; -1 for a filler, a sequence
            without learned tokens. Fillers give every rank the same number of micro-batches.
        routing_T: The experts that a sampler took for each token, shape [T, layers, k]; all
            `unrouted_number` for a token without any. None if no token has any.
    """

    tokens_T: NDArray[np.int32]
    learned_bits: NDArray[np.uint8]
    cu_seqlens: NDArray[np.int32]
    shared_S: Ints
    cu_loss_tokens: NDArray[np.int32]
    samples_S: Ints
    routing_T: ExpertNumbers | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in the pack (T)."""
        return len(self.tokens_T)

    @property
    def learned_T(self) -> Bools:
        """True for learned tokens."""
        return np.unpackbits(self.learned_bits, count=self.tokens).view(np.bool_)

    @property
    def loss_tokens(self) -> int:
        """The number of learned tokens in the pack (L)."""
        return int(self.cu_loss_tokens[-1])

    @property
    def positions_T(self) -> Ints:
        """The position of each token in its sequence."""
        firsts_S = self.cu_seqlens[:-1] - self.shared_S
        return np.arange(self.tokens) - np.repeat(firsts_S, np.diff(self.cu_seqlens))

    @property
    def predictor_L(self) -> Ints:
        """The index of the token before each learned token."""
        starts_S, before_T = self.cu_seqlens[:-1], np.arange(-1, self.tokens - 1)
        before_T[starts_S] = starts_S[leaders(self.shared_S)] + self.shared_S - 1
        return before_T[self.learned_T]

    @property
    def targets_L(self) -> Ints:
        """The learned tokens, as losses take them."""
        return self.tokens_T[self.learned_T].astype(np.int64)


@dataclass(frozen=True)
class BatchCounts:
    """The counts of one optimizer step, all ranks together.

    Losses are divided by these counts, never by those of a micro-batch. So the split into
    micro-batches and ranks does not change the gradient.

    Attributes:
        tokens: The number of learned tokens.
        sequences: The number of sequences.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> BatchCounts:
        """Return the counts of an optimizer step that learns from these samples."""
        return cls(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples))


def leaders(shared_S: Ints) -> Ints:
    """Return, for each sequence of a pack, the index of the sequence that holds its first tokens.

    That is the sequence itself if it shares none, or else the nearest such sequence before it.
    """
    return np.maximum.accumulate(np.where(shared_S == 0, np.arange(len(shared_S)), 0))


def cut(columns: BatchColumns, pack: Pack) -> PackColumns:
    """Return a batch's columns for the sequences of a pack."""
    return {column: column.cut(entries, pack) for column, entries in columns.items()}


def from_packed(
    packs: Iterable[Pack], values: Iterable[NDArray[Any]], layout: ColumnLayout = "L"
) -> list[NDArray[Any]]:
    """Return an array for each sample, in the order of the batch; the inverse of `Column.cut`.

    `values` has the numbers of each pack in this layout.
    """
    arrays: dict[int, NDArray[Any]] = {}
    for pack, own in zip(packs, values, strict=True):
        borders = pack.cu_loss_tokens if layout == "L" else np.arange(len(pack.samples_S) + 1)
        assert len(own) == borders[-1]
        pieces = zip(pack.samples_S.tolist(), borders[:-1], borders[1:], strict=True)
        arrays |= {sample: own[begin:end] for sample, begin, end in pieces}
    arrays.pop(-1, None)  # fillers
    return [arrays[sample] for sample in range(len(arrays))]
