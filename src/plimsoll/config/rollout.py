"""Who samples, how, and how new weights are proved to have arrived.

Environments that answer what is sampled, and how far an episode may go, stand here, too.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    Share,
    WrittenPath,
)
from plimsoll.config.engine import Dtype
from plimsoll.config.engines import (
    ROLLOUT_ENGINES,
    HasEngine,
    RolloutEngineConfig,
    with_engines,
)


class SamplingConfig(Settings):
    """How responses are sampled."""

    max_new_tokens: PositiveInt = 512
    """The longest response, in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; the trainer's log-probs use the same. 0 is greedy (evaluation only)."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 the sampler's log-probs differ from the trainer's."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens; 0 is all. Any other number makes the
    sampler's log-probs differ from the trainer's."""
    min_p: Probability = 0.0
    """Leave out tokens less likely than this share of the most likely one; above 0 the sampler's
    log-probs differ from the trainer's."""
    min_new_tokens: NonNegativeInt = 0
    """The fewest tokens of a response. Where an end is forbidden, the sampler's log-probs differ
    from the trainer's by the probability that the end had."""
    stop: tuple[str, ...] = ()
    """Strings that end a response (the end-of-sequence token always does)."""


DecidedRoute = Literal["ipc", "nccl", "host"]


class SyncConfig(Settings):
    """Weight sync and its proof."""

    route: Literal["auto"] | DecidedRoute = "auto"
    """How weights reach the engines. ipc: through the memory of a card that a rank and an engine
    share; nccl: between cards, by a process group; host: through the memory of the host. auto: ipc
    where engines share the ranks' cards, nccl where they have cards of their own, else host."""
    bucket_bytes: Literal["auto"] | PositiveInt = "auto"
    """Weights are gathered and sent in buckets of at most this size (or one tensor). auto: about a
    256th of the smallest card's memory, 64 MiB to 1 GiB; 256 MiB if no card is known."""
    max_roundings: PositiveFloat = 4.0
    """Stop when the mean absolute difference between the engines' and the trainer's log-probs of
    the probe tokens is over this many times what rounding alone makes of the trainer's: measured
    after each sync, in the coarser of both sides' dtypes."""
    max_logprob_gap: PositiveFloat | None = None
    """Stop when that difference is larger than this (nats), whatever the rounding; for engines
    that compute in still fewer bits. null: max_roundings decides."""
    rehearse: bool = True
    """Before the first step, send one layer of each kind with the other sign, and see that engines
    compute with it, sample with it, and take it back."""
    probe_sequences: PositiveInt = 16
    """Sequences in the probe: the first 64 tokens of each of the first prompts of data.train."""

    @property
    def decided_route(self) -> DecidedRoute:
        """The route of a run that is resolved."""
        assert self.route != "auto", "of a run that is resolved"
        return self.route

    @property
    def decided_bucket(self) -> int:
        """The bytes of a bucket of a run that is resolved."""
        assert self.bucket_bytes != "auto", "of a run that is resolved"
        return self.bucket_bytes


class ServeConfig(Settings):
    """The endpoint at which agents, environments that call the policy themselves, find it."""

    host: str = "127.0.0.1"
    """The address to listen at; each episode has a key of its own."""
    port: NonNegativeInt = 0
    """The port; 0: any that is free."""


@with_engines(ROLLOUT_ENGINES, "SAMPLING")
class RolloutConfig(HasEngine):
    """The engines that sample."""

    engines: PositiveInt = 1
    """How many engines (data parallel)."""
    placement: Literal["own", "shared"] = "own"
    """own: engines have GPUs of their own; shared: they use the training ranks' GPUs, in turns or
    side by side."""
    dtype: Dtype = "auto"
    """The dtype of the engine's weights and activations. auto: the actor's."""
    staleness: NonNegativeInt = 0
    """By how many versions the weights that sampled a token may be older than those that learn
    from it. 0: engines and ranks take turns. More: engines sample while the ranks train."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are sampled for training."""
    routing: Literal["live", "sampled"] = "live"
    """The experts by which the actor of a mixture of experts scores and learns. live: those that
    its own router chooses. sampled: those that the engine took for each token (router replay),
    where the engine returns them."""
    sync: SyncConfig = SyncConfig()
    """Weight sync and its proof."""
    serve: ServeConfig = ServeConfig()
    """The endpoint for agents; open if an environment is an agent."""
    replay: WrittenPath | None = None
    """Learn from the trajectories that the run of this directory stored, instead of sampling: no
    engine is started. `--replay RUN` sets it."""

    @property
    def engine(self) -> RolloutEngineConfig:
        """The settings of the engine, whichever it is."""
        return self.settings_of(RolloutEngineConfig)

    @property
    def degrees(self) -> dict[str, int]:
        """GPUs (or CPU processes) over which an engine is divided, by the dotted keys."""
        section = f"rollout.{self.engine_name}"
        return {f"{section}.{key}": count for key, count in self.engine.degrees.items()}

    @property
    def parts(self) -> int:
        """GPUs (or CPU processes) per engine."""
        return self.engine.parts

    @property
    def all_parts(self) -> int:
        """GPUs (or CPU processes) of all engines."""
        return self.engines * self.parts

    @property
    def rounds_as(self) -> str:
        """The coarsest format of numbers in an engine: its dtype, unless it rounds weights more."""
        return self.engine.rounds_as(self.dtype)

    @property
    def max_sequences(self) -> int:
        """Sequences that one engine works on at once."""
        return self.engine.max_sequences


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
