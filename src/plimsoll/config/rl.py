"""The config of reinforcement learning: its algorithm, environments and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Secret,
    Settings,
)
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.run import JobConfig, RlBatch

PACKAGE = "plimsoll.algorithm"
"""The package of the functions that `algorithm` chooses by name."""
FUNCTIONS = {
    "policy_loss": ("loss", "algorithm.policy_loss"),
    "preference_loss": ("loss", "algorithm.loss"),
    "reward_loss": ("loss", "algorithm.loss"),
    "feedback_loss": ("loss", "algorithm.loss"),
    "advantage": ("estimate", "algorithm.advantage"),
    "correction": ("weigh", "algorithm.correction"),
    "divergence": ("compare", "algorithm.divergence"),
}
"""For each package of algorithm/: the function in each of its files, and the key choosing it."""


class AdaptiveKlConfig(Settings):
    """A coefficient that moves towards a KL; Ziegler et al. 2019, arXiv 1909.08593, section 2.2."""

    target: PositiveFloat
    """The KL to reach, in nats."""
    per: Literal["response", "token"] = "response"
    """The unit of the target. response: the sum over the tokens of a response, as in the paper;
    token: the mean over responses of the mean over their tokens, as in OpenRLHF and verl."""
    horizon: PositiveInt = 10_000
    """Responses over which the coefficient moves."""


class KlConfig(Settings):
    """The KL divergence from the reference: estimator, place, coefficient."""

    place: Literal["reward", "loss"] = "reward"
    """reward: subtracted token by token from the reward; loss: added to the policy loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators of KL(policy || reference); http://joschu.net/blog/kl-approx.html."""
    coefficient: NonNegativeFloat = 0.01
    """The weight of the KL; the first weight, if it is adaptive."""
    adaptive: AdaptiveKlConfig | None = None
    """Adapt the coefficient; default: it stays."""
    ratio_corrected: bool = False
    """In the loss: multiply each token's KL by its importance ratio w. Its gradient is then
    the KL's, w (log policy - log reference), with every estimator and in every update of a step."""


def _none(value: object) -> object:
    """Return None for the word "none"."""
    return None if value == "none" else value


class RlAlgorithm(Settings):
    """The advantage that is made of rewards, and how the policy learns from it.

    The defaults are those of proximal policy optimisation; Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347.
    """

    advantage: Choice = Choice(name="gae", options={"gamma": 1.0, "gae_lambda": 0.95})
    """The advantage estimator: a file of algorithm/advantage/, or a function of one's own."""
    policy_loss: Choice = Choice(name="clip")
    """The policy loss: a file of algorithm/policy_loss/, or a function of one's own."""
    aggregation: Literal["tokens", "sequences", "constant"] = "tokens"
    """tokens: the mean of all action tokens of a step; sequences: the mean of the sequences' means;
    constant: the sum, divided by aggregation_tokens times the number of sequences."""
    aggregation_tokens: PositiveInt | None = None
    """The divisor of `aggregation: constant`; default: rollout.sampling.max_new_tokens."""
    correction: Choice | None = Choice(name="truncate", options={"level": "token", "high": 2.0})
    """Weights against the difference between sampler and trainer: a file of algorithm/correction/,
    or a function of one's own; null: none."""
    value_clip: PositiveFloat | None = 0.2
    """Clip the change of the value by this much; null turns value clipping off."""
    kl: Annotated[KlConfig | None, BeforeValidator(_none)] = KlConfig()
    """The KL from the reference; none: no reference is loaded at all."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut off at their longest, as in DAPO
    (arXiv 2503.14476, section 3.4). Their rewards still count in the advantages of others."""
    distill_weight: PositiveFloat = 1.0
    """With a `teacher`: the weight of the divergence from it, beside the rewards' advantage."""
    distill_divergence: Choice | None = None
    """With a `teacher`: a divergence over the whole vocabulary (`reverse_kl`, `forward_kl`, `jsd`,
    or a function of one's own), which replaces the policy loss; null: reverse KL by policy
    gradient: each sampled token's advantage gets the teacher's log-prob less the actor's."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean token entropy that is added to the objective."""
    epochs: PositiveInt = 1
    """Passes over each batch of trajectories."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass; must divide the number of trajectories of a step."""
    critic_mini_batches: PositiveInt | None = None
    """The same for the critic; default: as many as `mini_batches`."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the beginning that train the critic alone; the actor's schedule and an adaptive KL
    coefficient begin after them."""


ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "none"]


class EnvironmentConfig(Choice):
    """One environment, by its name or file.

    It is a name of Plimsoll's (`calculator`, `functions`, ...), a class of one's own
    (`path/to/file.py:MyEnvironment` or `my.module:MyEnvironment`), or an agent file of OpenRLHF's
    form, `agent.py`.
    """

    name: str
    """The environment's name, a class or function of one's own, or a file that ends in `.py`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class, of which one object is made for each episode."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call beside the environment's own tools, each by
    `my.module:function` or `path/to/file.py:function`, with a docstring and annotations."""
    max_turns: PositiveInt = 8
    """How often the policy speaks in an episode, at most."""
    max_tokens: PositiveInt = 2048
    """Tokens of an episode after its first prompt, sampled ones and answers together. A turn has at
    most `rollout.sampling.max_new_tokens` of them."""
    max_observation_tokens: PositiveInt = 512
    """The most tokens of one answer of the environment; a longer answer loses its middle."""
    tool_format: ToolFormat = "hermes"
    """How the model writes tool calls. hermes: `<tool_call>{...}</tool_call>`, as Qwen does; none:
    it calls no tools, and the environment reads its text."""
    describe_tools: bool = True
    """Have the chat template describe the tools in the prompt; false where the prompts do."""
    rewritten: Literal["refuse", "keep", "branch"] = "refuse"
    """What to do if the chat template changes earlier turns as a conversation goes on, such as by
    dropping earlier thoughts. keep: go on after the tokens as they were sampled. branch: go on
    after the text that the template writes, as a further sample of the same episode."""
    call_seconds: PositiveFloat = 60.0
    """The most seconds for one answer of the environment."""
    episode_seconds: PositiveFloat = 600.0
    """The most seconds for an episode; a longer one ends where it is, with what it has."""
    retries: NonNegativeInt = 1
    """Further tries of an episode whose environment failed, from its beginning."""
    process: bool = False
    """Play each episode's environment in a process of its own: one that hangs, crashes or takes too
    much memory is ended and replaced, which costs its episode alone. Else plain methods are called
    in threads."""
    memory_gib: PositiveFloat | None = None
    """GiB that it may take in its own process, besides what the loaded process holds."""
    at_once: PositiveInt | None = None
    """Episodes in flight. Default: 1.5 times as many as the engines work on at once, because
    some wait for their environments; in processes 4 for each core."""


class HttpReward(Settings):
    """Servers that score over HTTP; each of them can take any request."""

    urls: tuple[str, ...]
    """Their addresses, such as `http://host:8000/score`. A request goes to the least busy one; one
    that does not answer is left alone for a while."""
    format: Literal["plimsoll", "openrlhf", "vllm"] = "plimsoll"
    """The form of requests. plimsoll: as to `plimsoll serve-reward`, with references and columns;
    openrlhf: as OpenRLHF sends them, with query, prompts and labels; vllm: as to `/classify` of a
    vLLM that serves a reward model, with tokens."""
    tokenizer: str | None = None
    """For `openrlhf`: the model whose tokenizer writes the texts as the actor saw them, with the
    chat template; default: the prompt's text, followed by the response. For `vllm`: the reward
    model whose tokenizer and chat template render the conversation; default: the actor's tokens."""
    chat_template: str | None = None
    """The template of `vllm`'s tokenizer: Jinja, a file of it, or `none` for plain text; default:
    its own."""
    api_key: Secret | None = None
    """The environment variable that holds the servers' token, which is sent as `Authorization:
    Bearer`; never the token itself. Default: none is sent."""
    batch: PositiveInt = 32
    """Responses per request, at most."""
    at_once: PositiveInt = 4
    """Requests to one server at the same time."""
    time_limit: PositiveFloat = 60.0
    """Seconds for the answer to one request."""
    retries: NonNegativeInt = 8
    """Further tries after a failed request. The first comes after 0.5 s; each further wait is twice
    as long, up to 30 s: by default more than a minute in all."""


class JudgeReward(Settings):
    """A language model that judges responses, behind an endpoint of OpenAI's form."""

    url: str
    """The endpoint up to its version, such as `https://api.openai.com/v1`."""
    model: str
    """The model's name there."""
    prompt: str
    """The question: text in which `{prompt}`, `{response}`, `{reference}` and the names of further
    columns are replaced by the row's values; `{{` and `}}` are plain braces."""
    system: str | None = None
    """A system message before it."""
    pattern: str = r"(?i)score[^\d-]{0,10}(-?\d+(?:\.\d+)?)"
    """The regular expression whose first group is the score; of several matches the last counts."""
    low: float = 0.0
    """The lowest score that it may give; this is worth 0."""
    high: float = 10.0
    """The highest score that it may give; this is worth 1."""
    api_key: Secret | None = None
    """The environment variable that holds the key; never the key itself."""
    max_tokens: PositiveInt = 1024
    """The longest answer, in tokens."""
    temperature: NonNegativeFloat = 0.0
    """The judge's sampling temperature."""
    at_once: PositiveInt = 16
    """Requests at the same time."""
    time_limit: PositiveFloat = 120.0
    """Seconds for one answer."""
    retries: NonNegativeInt = 8
    """Further tries, as for `http.retries`; after an answer without a score, too."""


class RewardConfig(Choice):
    """One part of the reward, with its weight.

    It is a rule of Plimsoll's (`math_answer`, `pattern`, ...) or a Python function of one's own; or
    `http` servers; or a `judge`.
    """

    name: str = ""
    """The rule's name; or a `def` or `async def` of one's own, as `path/to/file.py:my_function` or
    `my.module:my_function`. One of name, http and judge is given."""
    weight: float = 1.0
    """The part's weight in the sum."""
    http: HttpReward | None = None
    """Servers that score."""
    judge: JudgeReward | None = None
    """A language model that judges."""
    batch: bool | None = None
    """Whether the function takes a list of trajectories and gives a list of numbers; default: as
    its first parameter is annotated (`list[Trajectory]` or `Sequence[Trajectory]`: yes)."""
    time_limit: PositiveFloat = 60.0
    """Seconds for one call of the function."""
    retries: NonNegativeInt = 2
    """Further calls after a failed call. The first comes after 0.1 s; each further wait is twice as
    long. A call keeps its place among `at_once` until its last try."""
    process: bool = False
    """Call the function in processes of their own: one that hangs, crashes or takes too much memory
    is ended and replaced, which costs its trajectory (of a batch function, its batch) alone."""
    memory_gib: PositiveFloat | None = None
    """GiB that the function may take in its own process, besides what the loaded process holds."""
    at_once: PositiveInt | None = None
    """Calls at the same time. Default: 1 for a plain function, which may not be safe in threads; in
    processes, or for a rule that uses some, one per core, up to 8; 64 for an `async def`."""
    clip: tuple[float, float] | None = None
    """The lowest and the highest value: a value outside becomes the nearer one, before
    `normalize`."""
    normalize: bool = False
    """Subtract the mean of all values that the run learned from so far, this step's among them, and
    divide by their standard deviation; in training only."""
    truncated_factor: NonNegativeFloat | None = None
    """The value is multiplied by this if the response was cut at the longest length (ProRL's
    stop_properly_penalty_coef); default: it stays."""


class StepsConfig(Settings):
    """How the scores that a process reward model gives to steps become one of the response."""

    separator: str = "\n\n"
    """What stands between two steps, as in the data that the model learned from."""
    take: Literal["min", "mean", "product", "last"] = "min"
    """How the steps' scores become one; each is a probability of being right."""


class RewardModelConfig(Settings):
    """A trained reward model that scores whole responses: a sequence classifier with one label."""

    role: FrozenRole
    """The model, and how it is kept."""
    weight: float = 1.0
    """The score's weight in the sum."""
    tokenizer: Literal["actor", "own"] = "actor"
    """actor: the model reads the actor's tokens; own: the conversation is rendered by its own chat
    template, and tokenized by its own tokenizer."""
    chat_template: str | None = None
    """The template of its own tokenizer: Jinja, a file of it, or `none` for plain text; default:
    the tokenizer's."""
    max_tokens: PositiveInt | None = None
    """Tokens of its own tokenizer; a longer conversation is cut at its beginning. Default: as many
    as the actor's longest sequence."""
    steps: StepsConfig | None = None
    """For a process reward model, which scores steps; default: the model scores responses."""


REWARD_MODEL = "reward_model"
"""The name of a single reward model's part of the reward, in metrics and trajectories."""
ENVIRONMENT = "environment"
"""The name of an environment's part of the reward there."""


class RlConfig(JobConfig):
    """Reinforcement learning from sampled responses and their rewards."""

    preset: str | None = None
    """Values that those of this file override: a preset's name, or a YAML file of one's own."""

    variant: Literal["paper"] | None = None
    """paper: the preset's values as the method's paper has them; default: as most train it today.
    `plimsoll PRESET --help` lists the differences."""

    cluster: ClusterConfig = ClusterConfig()
    """Where the roles live."""
    data: DataConfig
    """Prompts with reference answers."""
    batch: RlBatch = RlBatch()
    """What one step sees."""
    actor: TrainedRole
    """The policy."""
    critic: TrainedRole | None = None
    """The value function, for an advantage that takes values; it starts from its own model, with a
    new value head."""
    reference: FrozenRole | None = None
    """The frozen policy that the KL is measured from; default: the actor's first weights."""
    teacher: FrozenRole | None = None
    """A model of the actor's family that scores what the actor samples: on-policy distillation."""
    rewards: dict[str, RewardConfig] = Field(default={})
    """The parts of the reward, by the name they are shown under; may be left out beside a
    reward_model or a teacher."""
    reward_model: RewardModelConfig | None = None
    """A trained reward model, as a further part of the reward."""
    reward_models: dict[str, RewardModelConfig] = Field(default={})
    """Several reward models, by the names that their parts of the reward are shown under."""
    environments: dict[str, EnvironmentConfig] = Field(default={})
    """Environments that answer what is sampled, so that an episode has several turns; by name. If
    there are several, each row names its own (`environment` of its source). Their rewards come as
    the part `environment`, before `rewards`."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines that sample."""
    eval_sampling: SamplingConfig | None = None
    """How held-out prompts are answered; default: as in training."""
    algorithm: RlAlgorithm = RlAlgorithm()
    """Advantage, losses, KL."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts of the reward, in their order."""
        environment = (ENVIRONMENT,) if self.environments else ()
        return (*environment, *self.rewards, *self.scoring_models)

    @property
    def is_rewarded(self) -> bool:
        """Whether a reward counts: rewards of weight 0 are figures alone."""
        weights = [part.weight for part in self.rewards.values()]
        weights += [model.weight for model in self.scoring_models.values()]
        return any(weights) or bool(self.environments)

    @property
    def scoring_models(self) -> dict[str, RewardModelConfig]:
        """All reward models, by the names of their parts of the reward."""
        unnamed = {} if self.reward_model is None else {REWARD_MODEL: self.reward_model}
        return unnamed | self.reward_models
