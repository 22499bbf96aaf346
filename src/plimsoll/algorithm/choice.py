"""Find the functions that the config names: losses, advantage estimators, and others.

A config names a function of advantage.py, policy_loss.py, correction.py, preference_loss.py,
reward_loss.py, feedback_loss.py or divergence.py, or any function outside of Plimsoll. Further
positional parameters ask for further inputs: a preference loss gets the reference's log-probs, a
policy loss the sampler's, and an advantage estimator values, groups or greedy rewards, by the
parameters' names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from numbers import Real
from typing import Generic, TypeVar

import torch

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
from plimsoll.config.base import Choice
from plimsoll.config.choice import resolve_choice
from plimsoll.config.rl import FUNCTIONS, PACKAGE
from plimsoll.errors import ConfigError, PlimsollError, failure
from plimsoll.records import SAMPLER_LOGPROBS
from plimsoll.resolve.choices import AdvantageNeed, advantage_needs, needs_reference, needs_sampler

Output = TypeVar("Output")
Shapes = Mapping[str, torch.Size]

_METRICS_OF_ALL_JOBS = (
    "step|loss|grad_norm|skipped_steps|bad_steps|learning_rate|tokens|tokens_per_second|"
    "mfu|gpu_busy|(actor|critic)/micro_batch_tokens|epoch(/.*)?|(eval|seconds|memory_bytes)/.*"
)
_INTERVAL = "accuracy_low|accuracy_high"
_METRICS_OF_A_JOB = {
    "policy_loss": "policy_loss|entropy|kl(_loss|_clamped|_per_token|_coefficient)?|"
    "reward(/.*|_(min|max|std|length_correlation|share/.*))?|response_tokens|finished|truncated|"
    "zero_signal|repetition|correction.*|value_.*|teacher_divergence|nll|"
    "explained_variance|(actor|critic|sync|mismatch|groups)/.*",
    "preference_loss": f"preference_loss|nll|{_INTERVAL}",
    "reward_loss": f"reward_loss|off_centre|calibration_error|{_INTERVAL}",
    "feedback_loss": f"accuracy|{_INTERVAL}",
}
"""Patterns of a job's own metric names, by the file of algorithm/ that holds its losses."""


def policy_loss(choice: Choice) -> Callable[[PolicyObjectiveInputs], TokenLoss]:
    """Return the policy loss that the config names, with its options set.

    Errors: see `_resolve`.
    """

    def shapes(inputs: PolicyLossInputs, *_: object) -> Shapes:
        return {"loss_L": inputs.logprobs_L.shape}

    if needs_sampler(choice):
        compared = _resolve(choice, "policy_loss", TokenLoss, shapes, arguments=2)
        return lambda inputs: compared(inputs.policy, inputs.policy.columns[SAMPLER_LOGPROBS])
    loss = _resolve(choice, "policy_loss", TokenLoss, shapes)
    return lambda inputs: loss(inputs.policy)


def correction(choice: Choice) -> Callable[[CorrectionInputs], TokenWeights]:
    """Return the correction that the config names, with its options set; see `_resolve`."""

    def shapes(inputs: CorrectionInputs) -> Shapes:
        return {"weights_L": inputs.logratio_L.shape}

    return _resolve(choice, "correction", TokenWeights, shapes)


def preference_loss(choice: Choice) -> Callable[..., LossOutput]:
    """Return the preference loss that the config names, with its options set; see `_resolve`.

    If `needs_reference` is true for it, its second argument is the reference's log-probs.
    """
    arguments = 1 + needs_reference(choice)
    return _resolve(choice, "preference_loss", LossOutput, _scalar, arguments)


def reward_loss(choice: Choice) -> Callable[[RewardLossInputs], LossOutput]:
    """Return the reward loss that the config names, with its options set; see `_resolve`."""
    return _resolve(choice, "reward_loss", LossOutput, _scalar)


def feedback_loss(choice: Choice) -> Callable[[FeedbackLossInputs], LossOutput]:
    """Return the feedback loss that the config names, with its options set; see `_resolve`."""
    return _resolve(choice, "feedback_loss", LossOutput, _scalar)


def _scalar(*_: object) -> Shapes:
    return {"loss": torch.Size()}


def divergence(choice: Choice) -> Callable[[DivergenceInputs], DivergenceOutput]:
    """Return the divergence that the config names, with its options set; see `_resolve`."""

    def shapes(inputs: DivergenceInputs) -> Shapes:
        size_NV = inputs.student_NV.shape
        return {"values_N": size_NV[:1], "gradient_NV": size_NV}

    return _resolve(choice, "divergence", DivergenceOutput, shapes)


def advantage(
    choice: Choice,
) -> Callable[[AdvantageInputs, Mapping[AdvantageNeed, torch.Tensor]], Advantages]:
    """Return the advantage estimator that the config names, with its options set; see `_resolve`.

    Its second argument has the tensors that it needs beside its inputs (`advantage_needs`), by
    name.
    """
    needs = advantage_needs(choice)
    made = ("advantages_L", "returns_L") if "values_L" in needs else ("advantages_L",)

    def shapes(inputs: AdvantageInputs, *_: object) -> Shapes:
        return dict.fromkeys(made, inputs.shaping_L.shape)

    estimate = _resolve(choice, "advantage", Advantages, shapes, arguments=1 + len(needs))
    return lambda inputs, tensors: estimate(inputs, *(tensors[name] for name in needs))


@dataclass(frozen=True)
class _Checked(Generic[Output]):
    """A function whose output is checked at each call.

    The output must have the expected type, tensors of the shapes that the inputs imply, and a
    gradient if the inputs have one. Other outputs would be broadcast, fail far from here, or learn
    nothing.

    Attributes:
        key: the setting that chose the function.
        name: the value of that setting.
        kind: the file of algorithm/ that has the built-in functions of this kind.
        function: the function itself.
        output_type: the type of its output.
        shapes: gives the expected shapes of the output's tensors, by field, from the inputs.
    """

    key: str
    name: str
    kind: str
    function: Callable[..., Output]
    output_type: type[Output]
    shapes: Callable[..., Shapes]

    def __str__(self) -> str:
        return f"{self.key}: {self.name!r}"

    def __call__(self, *inputs: object) -> Output:
        """Return the function's output.

        Raises:
            ConfigError: the output is not as expected, or an input was changed.
            FunctionFailed: the function raised.
        """
        before = _versions(inputs)
        output, expected = self._output(*inputs), self.shapes(*inputs)
        if _versions(inputs) != before:
            raise ConfigError(
                f"{self} changed an input tensor, which is needed afterwards. Use functions that "
                f"make a new tensor, such as x.exp() and not x.exp_(), or begin with x.clone()."
            )
        shapes = {field: _shape(getattr(output, field, None)) for field in expected}
        if not isinstance(output, self.output_type) or shapes != expected:
            raise ConfigError(
                f"{self} gave {type(output).__name__} with {_list_shapes(shapes)}, and "
                f"{self.output_type.__name__} with {_list_shapes(expected)} is needed."
            )
        if any(x.requires_grad for x in _tensors(*inputs)) and not any(
            getattr(output, x).requires_grad for x in expected
        ):
            raise ConfigError(
                f"{self} gave a loss without a gradient: nothing would be learned from it. "
                f"Compute it from the inputs by torch, without .detach(), .item(), NumPy or "
                f"torch.no_grad() on the way, for empty inputs too."
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
        except BaseException as error:  # it may do anything, such as sys.exit
            raise failure(str(self), error) from error

    def _check_metrics(self, metrics: object, shape: torch.Size) -> None:
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{self} gave {_describe(metrics)} as `metrics`, and a dict is needed."
            )
        for name, value in metrics.items():
            is_number = not shape and isinstance(value, Real)
            if not isinstance(name, str) or not (is_number or _shape(value) == shape):
                form = "a number for each token" if shape else "one number"
                raise ConfigError(
                    f"{self} gave the metric {name!r} as {_describe(value)}. A metric is {form}, "
                    f"a tensor of shape {list(shape)}, and its name is a string."
                )
            if is_run_metric(self.kind, name):
                raise ConfigError(
                    f"{self} gave the metric {name!r}. The run has a metric of this name itself, "
                    f"and one would overwrite the other in metrics.jsonl. Give it another name, "
                    f"such as {'own/' + name.rpartition('/')[2]!r}."
                )


def is_run_metric(kind: str, name: str) -> bool:
    """Return whether Plimsoll reports a metric of this name in runs with a loss of this file."""
    return re.fullmatch(f"{_METRICS_OF_ALL_JOBS}|{_METRICS_OF_A_JOB[kind]}", name) is not None


def _describe(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _tensors(*values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among values and, recursively, in their fields and columns."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(*value.values())
        elif is_dataclass(value):
            yield from _tensors(vars(value))


def _versions(inputs: tuple[object, ...]) -> list[int]:
    """Return how often each tensor has been written to."""
    return [tensor._version for tensor in _tensors(*inputs)]


def _shape(value: object) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _list_shapes(shapes: Mapping[str, torch.Size | None]) -> str:
    forms = ("no tensor" if s is None else f"shape {list(s)}" for s in shapes.values())
    return ", ".join(map("{}: {}".format, shapes, forms))


def _resolve(
    choice: Choice,
    kind: str,
    output_type: type[Output],
    shapes: Callable[..., Shapes],
    arguments: int = 1,
) -> Callable[..., Output]:
    """Return the function that `choice` names in a file of algorithm/, with its options set.

    It takes `arguments` positional arguments, and checks its output at each call (see `_Checked`).

    Raises:
        ConfigError: a name, option or option's value cannot be used, or the function takes another
            number of positional arguments.
    """
    key = FUNCTIONS[kind]
    try:
        function = resolve_choice(choice, f"{PACKAGE}.{kind}", arguments=arguments)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return _Checked(key, choice.name, kind, function, output_type, shapes)
