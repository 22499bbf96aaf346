"""Where the reward of a response comes from."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Secret,
    Settings,
)
from plimsoll.config.engine import FrozenRole


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
    processes, or for a rule that uses some, so many on each node of the run: one per core, up to 8
    or a quarter of the cores; 64 for an `async def`."""
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
