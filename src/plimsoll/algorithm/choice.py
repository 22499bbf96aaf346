"""The losses and the advantage estimator that the config chooses, ready to be called.

A new one is one new file and one config value: a file in policy_loss/, preference_loss/,
reward_loss/ or feedback_loss/ with a function `loss`, in divergence/ with a function `compare`, in
advantage/ with a function `estimate`, or in correction/ with a function `weigh`; or, outside of
Plimsoll, any function of one's own. A function asks for more than its inputs by its positional
parameters: a preference loss for the reference's log-probs, a policy loss for the sampler's, an
advantage estimator for values, groups or greedy rewards by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Generic, TypeVar

import torch

from plimsoll.algorithm.failure import failure
from plimsoll.algorithm.inputs import (
    AdvantageInputs,
    Advantages,
    CorrectionInputs,
    DivergenceInputs,
    DivergenceOutput,
    FeedbackLossInputs,
    LossOutput,
    PolicyLossInputs,
    RewardLossInputs,
    TokenLoss,
    TokenWeights,
)
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs
from plimsoll.config.algorithm import FUNCTIONS, PACKAGE
from plimsoll.config.base import Choice
from plimsoll.config.choice import resolve_choice
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.spec.choices import AdvantageNeed, advantage_needs, needs_reference, needs_sampler

Output = TypeVar("Output")
Shapes = Mapping[str, torch.Size]

_OF_ALL_JOBS = (
    "step|loss|grad_norm|skipped_steps|learning_rate|tokens|tokens_per_second|"
    "mfu|gpu_busy|epoch(/.*)?|(eval|seconds|memory_bytes)/.*"
)
_INTERVAL = "accuracy_low|accuracy_high"
_OF_A_JOB = {
    "policy_loss": "policy_loss|entropy|kl(_loss|_clamped|_per_token|_coefficient)?|reward(/.*)?|"
    "response_tokens|finished|truncated|zero_signal|repetition|correction.*|value_.*|"
    "explained_variance|(actor|critic|sync|mismatch|groups)/.*",
    "preference_loss": f"preference_loss|nll|{_INTERVAL}",
    "reward_loss": f"reward_loss|off_centre|calibration_error|{_INTERVAL}",
    "feedback_loss": f"accuracy|{_INTERVAL}",
}
"""By the package of algorithm/ that holds the job's losses; those of its evaluation, which begin
with `eval/` there, are among them."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss, and whether it takes the reference's log-probs (`PairValues`) as its
    second argument, beside `PreferenceLossInputs`."""

    compute: Callable[..., LossOutput]
    needs_reference: bool


@dataclass(frozen=True)
class _PolicyLoss:
    """A policy loss, given what it asks for; it crosses processes. compared: it takes the sampler's
    log-probs."""

    compute: Callable[..., TokenLoss]
    compared: bool

    def __call__(self, inputs: PolicyObjectiveInputs) -> TokenLoss:
        more = [inputs.sampler_logprobs_L] if self.compared else []
        return self.compute(inputs.policy, *more)


def policy_loss(choice: Choice) -> Callable[[PolicyObjectiveInputs], TokenLoss]:
    """The policy loss of the config, its options bound. Errors: see `_held`."""
    compared = needs_sampler(choice)
    loss = _held(choice, "policy_loss", TokenLoss, _token_loss, arguments=1 + compared)
    return _PolicyLoss(loss, compared)


def correction(choice: Choice) -> Callable[[CorrectionInputs], TokenWeights]:
    """The correction of the config, its options bound. Errors: see `_held`."""
    return _held(choice, "correction", TokenWeights, _weights)


def preference_loss(choice: Choice) -> PreferenceLoss:
    """The preference loss of the config, its options bound. Errors: see `_held`."""
    compared = needs_reference(choice)
    loss = _held(choice, "preference_loss", LossOutput, _one_loss, arguments=1 + compared)
    return PreferenceLoss(loss, compared)


def reward_loss(choice: Choice) -> Callable[[RewardLossInputs], LossOutput]:
    """The reward loss of the config, its options bound. Errors: see `_held`."""
    return _held(choice, "reward_loss", LossOutput, _one_loss)


def feedback_loss(choice: Choice) -> Callable[[FeedbackLossInputs], LossOutput]:
    """The feedback loss of the config, its options bound. Errors: see `_held`."""
    return _held(choice, "feedback_loss", LossOutput, _one_loss)


def divergence(choice: Choice) -> Callable[[DivergenceInputs], DivergenceOutput]:
    """The divergence of the config, its options bound. Errors: see `_held`."""
    return _held(choice, "divergence", DivergenceOutput, _rows)


def advantage(
    choice: Choice,
) -> Callable[[AdvantageInputs, Mapping[AdvantageNeed, torch.Tensor]], Advantages]:
    """The advantage estimator of the config, its options bound. It is given what it needs
    (`advantage_needs`) by name. Errors: see `_held`."""
    needs = advantage_needs(choice)
    estimate = _held(
        choice,
        "advantage",
        Advantages,
        _returns if "values_L" in needs else _tokens,
        arguments=1 + len(needs),
    )
    return lambda inputs, given: estimate(inputs, *(given[name] for name in needs))


def _token_loss(inputs: PolicyLossInputs, *_: object) -> Shapes:
    return {"loss_L": inputs.logprobs_L.shape}


def _weights(inputs: CorrectionInputs) -> Shapes:
    return {"weights_L": inputs.logratio_L.shape}


def _one_loss(*_: object) -> Shapes:
    return {"loss": torch.Size()}


def _rows(inputs: DivergenceInputs) -> Shapes:
    size_NV = inputs.student_NV.shape
    return {"values_N": size_NV[:1], "gradient_NV": size_NV}


def _tokens(inputs: AdvantageInputs, *_: object) -> Shapes:
    return {"advantages_L": inputs.shaping_L.shape}


def _returns(inputs: AdvantageInputs, *_: object) -> Shapes:
    return dict.fromkeys(("advantages_L", "returns_L"), inputs.shaping_L.shape)


@dataclass(frozen=True)
class _Held(Generic[Output]):
    """A function whose output is held to a kind, with tensors of the shapes that its inputs ask
    for, and to a gradient where they have one: others would be broadcast, fail far from here, or
    learn nothing.

    key: which setting chose it. name: what the setting says. package: of algorithm/.
    """

    key: str
    name: str
    package: str
    function: Callable[..., Output]
    kind: type[Output]
    shapes: Callable[..., Shapes]

    def __str__(self) -> str:
        return f"{self.key}: {self.name!r}"

    def __call__(self, *inputs: object) -> Output:
        """Raises ConfigError for another output, and FunctionFailed where the function raises."""
        before = _versions(inputs)
        output, wanted = self._output(*inputs), self.shapes(*inputs)
        if _versions(inputs) != before:
            raise ConfigError(
                f"{self} changed a tensor that it was given, which is needed afterwards. Use "
                f"functions that make a new one, such as x.exp() and not x.exp_(), or begin with "
                f"x.clone()."
            )
        found = {field: _shape(getattr(output, field, None)) for field in wanted}
        if not isinstance(output, self.kind) or found != wanted:
            raise ConfigError(
                f"{self} gave {type(output).__name__} with {_listed(found)}, and "
                f"{self.kind.__name__} with {_listed(wanted)} is needed. docs/extend.md shows one."
            )
        if any(x.requires_grad for x in _tensors(*inputs)) and not any(
            getattr(output, x).requires_grad for x in wanted
        ):
            raise ConfigError(
                f"{self} gave a loss without a gradient: nothing would be learned from it. "
                f"It must be computed from its inputs by torch, without .detach(), .item(), NumPy "
                f"or torch.no_grad() on the way, where they are empty too. docs/extend.md shows "
                f"one."
            )
        if isinstance(output, LossOutput):
            self._check_metrics(output.metrics, torch.Size())
        if isinstance(output, TokenLoss):
            self._check_metrics(output.metrics, output.loss_L.shape)
        return output

    def _output(self, *inputs: object) -> object:
        try:
            return self.function(*inputs)
        except (KeyboardInterrupt, PlimsollError):
            raise
        except BaseException as error:  # own code may do anything, such as sys.exit
            raise failure(str(self), error) from error

    def _check_metrics(self, metrics: object, shape: torch.Size) -> None:
        """They are added up over micro-batches and ranks, where nobody knows whose they are. shape:
        that each must have."""
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"{self} gave {_told(metrics)} as `metrics`, and a dict is needed.")
        for name, value in metrics.items():
            plain = not shape and isinstance(value, Real)
            if not isinstance(name, str) or not (plain or _shape(value) == shape):
                wanted = "a number for each token" if shape else "one number"
                raise ConfigError(
                    f"{self} gave the metric {name!r} as {_told(value)}. A metric is {wanted}, a "
                    f"tensor of shape {list(shape)}, and its name a text."
                )
            if of_the_run(self.package, name):
                raise ConfigError(
                    f"{self} gave the metric {name!r}. The run has one of "
                    f"this name itself, and one would overwrite the other in metrics.jsonl. Give "
                    f"it another name, such as {'own/' + name.rpartition('/')[2]!r}."
                )


def of_the_run(package: str, name: str) -> bool:
    """Whether a run whose loss is of this package of algorithm/ has a metric of this name, whatever
    the loss."""
    return re.fullmatch(f"{_OF_ALL_JOBS}|{_OF_A_JOB[package]}", name) is not None


def _told(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _tensors(*values: object) -> Iterator[torch.Tensor]:
    """Those of records, and of records in these."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(*(getattr(value, field.name) for field in fields(value)))


def _versions(inputs: tuple[object, ...]) -> list[int]:
    """How often each tensor has been written to."""
    return [tensor._version for tensor in _tensors(*inputs)]


def _shape(value: object) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _listed(shapes: Mapping[str, torch.Size | None]) -> str:
    kinds = {name: "no tensor" if s is None else f"shape {list(s)}" for name, s in shapes.items()}
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def _held(
    choice: Choice,
    package: str,
    kind: type[Output],
    shapes: Callable[..., Shapes],
    arguments: int = 1,
) -> Callable[..., Output]:
    """The function that `choice` names in a package of algorithm/, its options checked and bound.

    arguments: how many it takes by position.
    Raises ConfigError for a name, option or option's value that cannot be used, and for a function
    that does not take just these arguments.
    """
    name, key = FUNCTIONS[package]
    try:
        function = resolve_choice(choice, f"{PACKAGE}.{package}", name, arguments)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return _Held(key, choice.name, package, function, kind, shapes)
