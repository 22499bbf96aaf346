"""Records that describe the run of a foreign command, independent of any trainer.

A converter fills these records. Only `writer` knows the keys of a config. Every value has the ids
of the settings from which it was made. A field is None if the command does not set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class _NoValue:
    """Stand for a value that only the user can give."""


NO_VALUE = _NoValue()


@dataclass(frozen=True)
class Sourced:
    """A value and its origin.

    Attributes:
        value: The value, or NO_VALUE if there is only something to check.
        settings: Ids of the settings from which the value was made; empty if it follows from how
            the program was started.
        note: How the value was made.
        check: What the user should check; "" for nothing.
    """

    value: object
    settings: tuple[str, ...] = ()
    note: str = ""
    check: str = ""


Value = Sourced | None


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Cards and machines.

    Attributes:
        rank_sleep: What ranks move to host memory while engines sample.
        address: HOST:PORT of Ray's head.
    """

    ranks: Value = None
    critic_ranks: Value = None
    reward_ranks: Value = None
    rank_sleep: Value = None
    nodes: Value = None
    device: Value = None
    address: Value = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and how it is computed."""

    path: Value = None
    dtype: Value = None
    trust_remote_code: Value = None
    gradient_checkpointing: Value = None
    activation_offload: Value = None
    quantization: Value = None
    double_quantization: Value = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter."""

    rank: Value = None
    alpha: Value = None
    dropout: Value = None
    targets: Value = None
    rslora: Value = None
    dora: Value = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The changes of the learning rate.

    Attributes:
        shape: cosine, linear or constant.
        warmup_ratio: Share of the run in which the rate rises. `warmup_steps` may be set instead.
        final_ratio: Rate at the end, as a share of the peak rate.
    """

    shape: Value = None
    warmup_ratio: Value = None
    warmup_steps: Value = None
    final_ratio: Value = None


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its schedule."""

    kind: Value = None
    learning_rate: Value = None
    beta1: Value = None
    beta2: Value = None
    eps: Value = None
    weight_decay: Value = None
    max_grad_norm: Value = None
    schedule: Schedule | None = None


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How ZeRO divides a trained role among the ranks. FSDP is recorded as a ZeRO stage.

    Attributes:
        secondary_partition: Number of ranks that share a second copy of the weights.
        gradient_dtype: Type in which gradients are summed.
    """

    stage: Value = None
    optimizer_offload: Value = None
    parameter_offload: Value = None
    secondary_partition: Value = None
    gradient_dtype: Value = None
    state_dtype: Value = None


@dataclass(frozen=True, kw_only=True)
class LearningRole:
    """A role that learns. `average_decay` is the decay of a moving average of its weights."""

    model: Model | None = None
    adapter: Adapter | None = None
    optimizer: Optimizer | None = None
    sharding: Sharding | None = None
    average_decay: Value = None


@dataclass(frozen=True, kw_only=True)
class ScoringRole:
    """A role that only scores: reference, teacher or reward model."""

    model: Model | None = None
    stage: Value = None
    offload: Value = None


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model."""

    role: ScoringRole | None = None
    weight: Value = None
    tokenizer: Value = None


@dataclass(frozen=True, kw_only=True)
class ForeignRows:
    """One data set.

    Attributes:
        path: File, folder or name on the hub.
        name: Configuration of a data set on the hub.
        columns: Column names by purpose, such as prompt.
        limit: The most rows that are read.
        weight: Share of the rows in a mixture.
        responses: Responses that are sampled for each held-out prompt.
    """

    path: Value = None
    name: Value = None
    split: Value = None
    columns: Mapping[str, Value] = field(default_factory=dict)
    limit: Value = None
    weight: Value = None
    responses: Value = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows, and how they are read.

    Attributes:
        train: One data set, or several by name.
        held_out: The same for evaluation.
        longest: The most tokens of a prompt in RL, else of a sequence.
        over_long: How longer rows are treated.
        on_bad_row: How rows that cannot be used are treated.
        chat_template: The template as Jinja text, or its path.
        mixture: What the user should check about several data sets.
    """

    train: ForeignRows | Mapping[str, ForeignRows] | None = None
    held_out: ForeignRows | Mapping[str, ForeignRows] | None = None
    longest: Value = None
    over_long: Value = None
    on_bad_row: Value = None
    shuffle: Value = None
    chat_template: Value = None
    mixture: Value = None


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Dynamic sampling: groups whose mean reward is not between two bounds are replaced.

    Attributes:
        by: The part of the reward that is compared with the bounds.
        most_drawn: The most prompts that a step draws, as a multiple of the batch's prompts.
        oversampling: Prompts that are sampled at once, as a multiple of the batch's prompts.
    """

    low: Value = None
    high: Value = None
    by: Value = None
    most_drawn: Value = None
    oversampling: Value = None


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sizes of one optimizer step (sequences, pairs) or of one step of RL (prompts).

    Attributes:
        responses: Number of responses to each prompt.
        micro_batch_tokens: Number of tokens of a micro-batch on one rank.
    """

    sequences: Value = None
    pairs: Value = None
    prompts: Value = None
    responses: Value = None
    micro_batch_tokens: Value = None
    dynamic_sampling: GroupFilter | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The settings by which responses are sampled."""

    max_new_tokens: Value = None
    temperature: Value = None
    top_p: Value = None
    top_k: Value = None
    min_p: Value = None


@dataclass(frozen=True, kw_only=True)
class ForeignEngine:
    """The settings that one kind of engine has.

    Attributes:
        name: vllm or transformers.
        memory_share: Share of a card's memory that an engine takes.
        sleep_level: vLLM's sleep level: which memory an engine frees while roles train.
    """

    name: Sourced
    tensor_parallel: Value = None
    pipeline_parallel: Value = None
    memory_share: Value = None
    sleep_level: Value = None
    max_sequences: Value = None
    enforce_eager: Value = None
    max_num_batched_tokens: Value = None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The engines that sample.

    Attributes:
        engine: The kind of the engines, with its settings.
        engines: Number of engines.
        placement: `shared` on the ranks' cards, or `own`.
    """

    engine: ForeignEngine
    engines: Value = None
    placement: Value = None
    dtype: Value = None
    sampling: SamplingSettings | None = None
    eval_sampling: SamplingSettings | None = None


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An environment of several turns."""

    name: Value = None
    max_tokens: Value = None
    max_turns: Value = None
    tool_format: Value = None


@dataclass(frozen=True, kw_only=True)
class RewardServer:
    """Servers that score responses. `time_limit` is in seconds."""

    urls: Value = None
    format: Value = None
    tokenizer: Value = None
    time_limit: Value = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """The name and options of an advantage, loss, correction or divergence."""

    name: Value = None
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """A part of the reward: a rule or function with its options, or servers.

    Attributes:
        truncated_factor: Factor for responses that were cut off.
    """

    name: Value = None
    options: Mapping[str, Value] = field(default_factory=dict)
    server: RewardServer | None = None
    weight: Value = None
    clip: Value = None
    truncated_factor: Value = None


@dataclass(frozen=True, kw_only=True)
class KL:
    """The KL divergence from the reference.

    Attributes:
        place: `reward` or `loss`.
        estimator: k1, k2 or k3.
        ratio_corrected: Whether the estimator's gradient is the gradient of the KL itself.
        target: KL that the adaptive coefficient aims at; a larger `horizon` adapts more slowly.
        target_per: The unit of the target.
    """

    place: Value = None
    coefficient: Value = None
    estimator: Value = None
    ratio_corrected: Value = None
    target: Value = None
    target_per: Value = None
    horizon: Value = None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The algorithm of the run.

    Attributes:
        aggregation: The loss is the mean of these units, such as tokens or sequences.
        aggregation_tokens: Number by which the sum of each response's tokens is divided.
        correction: Correction for the difference between sampler and trainer; a value of None
            turns it off.
        kl: KL from the reference; a value of `none` turns it off.
        epochs: How often the responses of an RL step are learned.
        mini_batches: Number of optimizer steps per RL step.
        loss: Loss of pairs, labels or a reward model.
        nll_weight: Weight of the log-likelihood beside a loss of pairs.
        nll_share: Share of the log-likelihood in distillation.
        centring: Weight that keeps rewards around 0.
        noise: Alpha of NEFTune.
        learned_tokens: Which turns are learned.
        divergence: Divergence from the teacher.
        temperature: Temperature of the teacher.
        precompute_reference: Whether the reference's log-probs are computed once.
    """

    advantage: Method | None = None
    policy_loss: Method | None = None
    aggregation: Value = None
    aggregation_tokens: Value = None
    correction: Method | Sourced | None = None
    kl: KL | Sourced | None = None
    value_clip: Value = None
    critic_warmup_steps: Value = None
    epochs: Value = None
    mini_batches: Value = None
    mask_truncated: Value = None
    critic_mini_batches: Value = None
    entropy_bonus: Value = None
    loss: Method | None = None
    nll_weight: Value = None
    nll_share: Value = None
    centring: Value = None
    noise: Value = None
    learned_tokens: Value = None
    divergence: Method | None = None
    temperature: Value = None
    precompute_reference: Value = None


@dataclass(frozen=True, kw_only=True)
class Best:
    """The rule for the best checkpoint."""

    metric: Value = None
    goal: Value = None
    final_model: Value = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length of the run, and the checkpoints and logs that it keeps."""

    directory: Value = None
    seed: Value = None
    epochs: Value = None
    steps: Value = None
    save_every: Value = None
    keep_checkpoints: Value = None
    resume: Value = None
    eval_every: Value = None
    best: Best | None = None
    loggers: Value = None
    logger_project: Value = None


@dataclass(frozen=True, kw_only=True)
class ForeignRun:
    """The run that a command describes: the record with all others."""

    machines: Machines
    actor: LearningRole
    critic: LearningRole | None = None
    reference: ScoringRole | None = None
    teacher: ScoringRole | None = None
    reward_model: RewardModel | None = None
    reward_models: Mapping[str, RewardModel] = field(default_factory=dict)
    rewards: Mapping[str, RewardTerm] = field(default_factory=dict)
    agents: Mapping[str, Agent] = field(default_factory=dict)
    data: Data
    batch: BatchSizes
    rollout: Rollout | None = None
    algorithm: Algorithm
    run: Run
