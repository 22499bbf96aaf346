"""Losses and advantages by name and by import path: a new one is one file and one config value."""

from __future__ import annotations

import math
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

from plimsoll.algorithm.choice import (
    advantage,
    correction,
    divergence,
    policy_loss,
    preference_loss,
)
from plimsoll.algorithm.inputs import (
    AdvantageInputs,
    CorrectionInputs,
    DivergenceInputs,
    PairValues,
    PolicyLossInputs,
    PreferenceLossInputs,
)
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs
from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.choice import built_in_names
from plimsoll.config.rl import RlAlgorithm
from plimsoll.errors import ConfigError, FunctionFailed
from plimsoll.records import SAMPLER_LOGPROBS
from plimsoll.resolve.choices import AdvantageNeed, advantage_needs, needs_sampler

torch.set_num_threads(1)

NEW_LOSS = '''
"""REINFORCE: what a user writes."""
from __future__ import annotations

from plimsoll.algorithm.inputs import PolicyLossInputs, TokenLoss

def reinforce(inputs: PolicyLossInputs, *, scale: float = 1.0) -> TokenLoss:
    loss_L = -scale * inputs.logprobs_L * inputs.advantages_L
    return TokenLoss(loss_L, metrics={"scale": loss_L.detach() * 0 + scale})

def no_inputs() -> TokenLoss: ...

METRICS = {}

def with_metrics(inputs: PolicyLossInputs) -> TokenLoss:
    return TokenLoss(inputs.logprobs_L * 1, METRICS)

def off_sampler(inputs: PolicyLossInputs, sampler_logprobs_L) -> TokenLoss:
    return TokenLoss((inputs.logprobs_L - sampler_logprobs_L).exp(), {})

def detached(inputs: PolicyLossInputs) -> TokenLoss:
    return reinforce(PolicyLossInputs(inputs.logprobs_L.detach(), *list(vars(inputs).values())[1:]))
'''

NEW_PREFERENCE_LOSSES = """
from torch.nn.functional import logsigmoid

from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs

def reference_free(inputs: PreferenceLossInputs, *, scale: float = 1.0) -> LossOutput:
    return LossOutput(-logsigmoid(scale * inputs.logprobs.margin_P).sum() / inputs.pairs, {})

def compared(inputs: PreferenceLossInputs, reference: PairValues) -> LossOutput:
    return LossOutput((inputs.logprobs - reference).margin_P.sum() / inputs.pairs, {})

def detached(inputs: PreferenceLossInputs) -> LossOutput:
    return LossOutput(inputs.logprobs.margin_P.detach().sum() / inputs.pairs, {})

def greedy(inputs: PreferenceLossInputs, reference: PairValues, more: PairValues) -> LossOutput: ...
"""

NEW_ADVANTAGE = """
from plimsoll.algorithm.inputs import AdvantageInputs, Advantages

def rewards_alone(inputs: AdvantageInputs) -> Advantages:
    return Advantages(inputs.rewards_L)

def greedy_then_groups(inputs, greedy_S, group_S, *, scale: float = 1.0) -> Advantages:
    return Advantages(scale * (greedy_S * 10 + group_S)[[0, 0]])
"""

OTHER_OUTPUTS = """
from plimsoll.algorithm.inputs import Advantages, TokenLoss

def tensor_alone(inputs):
    return inputs.logprobs_L * 1

def one_loss(inputs):
    return TokenLoss(inputs.logprobs_L.sum(), {})

def number(inputs):
    return TokenLoss(inputs.logprobs_L.sum().item(), {})

def advantage_of_each_sequence(inputs):
    return Advantages(inputs.rewards_L[-1:], inputs.rewards_L)

def without_returns(inputs, values_L):
    return Advantages(inputs.rewards_L - values_L)
"""

RAISING = """
import sys

from plimsoll.algorithm.inputs import DivergenceOutput
from plimsoll.errors import ConfigError

def look_up(options):
    return options["beta"]

def looks_up(inputs):
    return look_up({})

def overwrites(inputs):
    gradient_NV = inputs.student_NV.exp_()
    return DivergenceOutput(gradient_NV.sum(1), gradient_NV)

def leaves(inputs):
    sys.exit(3)

def is_interrupted(inputs):
    raise KeyboardInterrupt

def refuses(inputs):
    raise ConfigError("dual_clip is 0.5")
"""

INPUTS = AdvantageInputs(
    parts_SR=torch.tensor([[1.0]], dtype=torch.float64),
    weights_R=torch.tensor([1.0], dtype=torch.float64),
    shaping_L=torch.zeros(2),
    cu_loss_tokens=torch.tensor([0, 2]),
)
GIVEN: dict[AdvantageNeed, torch.Tensor] = {
    "values_L": torch.tensor([0.5, 0.5]),
    "group_S": torch.tensor([4]),
    "greedy_S": torch.tensor([2.0]),
    "turn_L": torch.tensor([0, 0]),
}
"""A tensor for each need."""


def policy_inputs(*, learns: bool = True) -> PolicyObjectiveInputs:
    policy = PolicyLossInputs(
        logprobs_L=torch.tensor([-1.0, -2.0], requires_grad=learns),
        old_logprobs_L=torch.tensor([-1.0, -2.0]),
        advantages_L=torch.tensor([1.0, 3.0]),
        cu_loss_tokens=torch.tensor([0, 2]),
        columns={SAMPLER_LOGPROBS: torch.tensor([-1.0, -3.0])},
    )
    return PolicyObjectiveInputs(policy, torch.zeros(2))


def test_the_defaults_of_the_config_resolve() -> None:
    algorithm = RlAlgorithm()
    assert policy_loss(algorithm.policy_loss)(policy_inputs()).loss_L.tolist() == [-1, -3]
    output = advantage(algorithm.advantage)(INPUTS, GIVEN)
    # of 0.475 and 0.5, whitened
    assert output.advantages_L.tolist() == pytest.approx([-1, 1], abs=1e-4)
    assert algorithm.correction is not None
    weights_L = correction(algorithm.correction)(policy_inputs().correction).weights_L
    assert weights_L.tolist() == pytest.approx([1, 2])  # e^0, and e^1 cut at 2


def test_options_reach_the_function() -> None:
    options: dict[str, OptionValue] = {"gamma": 1, "gae_lambda": 0.0, "whiten": False}
    estimator = advantage(Choice(name="gae", options=options))
    assert estimator(INPUTS, GIVEN).advantages_L.tolist() == pytest.approx([0.0, 0.5])


def test_every_function_of_the_files_resolves() -> None:
    for name in built_in_names("plimsoll.algorithm.policy_loss"):
        assert policy_loss(Choice(name=name))(policy_inputs()).loss_L.requires_grad
    for name in built_in_names("plimsoll.algorithm.advantage"):
        advantage(Choice(name=name))(INPUTS, GIVEN)
    for name in built_in_names("plimsoll.algorithm.correction"):
        correction(Choice(name=name))(policy_inputs().correction)


def test_a_new_loss_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_new_loss.py").write_text(NEW_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    choice = Choice(name="my_new_loss:reinforce", options={"scale": 2})
    # -2 * -1 * 1 and -2 * -2 * 3
    assert policy_loss(choice)(policy_inputs()).loss_L.tolist() == [2, 12]
    with pytest.raises(ConfigError, match=r"no option 'scael'.*mean 'scale'"):
        policy_loss(Choice(name="my_new_loss:reinforce", options={"scael": 2}))
    with pytest.raises(ConfigError, match=r"'my_new_loss:no_inputs' .*1 positional argument\b"):
        policy_loss(Choice(name="my_new_loss:no_inputs"))


def test_a_policy_loss_takes_the_samplers_log_probs_by_a_second_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_new_loss.py").write_text(NEW_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    choice = Choice(name="my_new_loss:off_sampler")
    assert needs_sampler(choice) and not needs_sampler(Choice(name="clip"))
    output = policy_loss(choice)(policy_inputs()).loss_L
    assert output.tolist() == pytest.approx([1, math.e])


def test_a_new_preference_loss_says_by_its_parameters_whether_it_needs_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pairs.py").write_text(NEW_PREFERENCE_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    logprobs = PairValues(torch.tensor([-1.0]), torch.tensor([-3.0]))
    inputs = PreferenceLossInputs(logprobs, PairValues(torch.ones(1), torch.ones(1)), pairs=2)
    free = preference_loss(Choice(name="my_pairs:reference_free", options={"scale": 0.0}))
    assert free(inputs).loss.item() == pytest.approx(0.3465736)
    compared = preference_loss(Choice(name="my_pairs:compared"))
    reference = PairValues(torch.tensor([-1.0]), torch.tensor([-1.0]))
    assert compared(inputs, reference).loss == 1
    with pytest.raises(ConfigError, match=r"'my_pairs:greedy' .*2 positional arguments"):
        preference_loss(Choice(name="my_pairs:greedy"))
    with pytest.raises(ConfigError, match=r"preference_loss .*'dop'.*'dpo'"):
        preference_loss(Choice(name="dop"))


def test_a_new_advantage_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_new_advantage.py").write_text(NEW_ADVANTAGE)
    monkeypatch.syspath_prepend(tmp_path)
    estimator = advantage(Choice(name="my_new_advantage:rewards_alone"))
    assert estimator(INPUTS, GIVEN).advantages_L.tolist() == [0.0, 1.0]
    choice = Choice(name="my_new_advantage:greedy_then_groups", options={"scale": 2.0})
    assert advantage_needs(choice) == ("greedy_S", "group_S")
    assert advantage(choice)(INPUTS, GIVEN).advantages_L.tolist() == [48.0, 48.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tensor_alone", "Tensor with loss_L: no tensor"),
        ("one_loss", r"TokenLoss with loss_L: shape \[\]"),
        ("number", "TokenLoss with loss_L: no tensor"),
    ],
)
def test_a_loss_with_another_output_is_refused(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_outputs.py").write_text(OTHER_OUTPUTS)
    monkeypatch.syspath_prepend(tmp_path)
    loss = policy_loss(Choice(name=f"other_outputs:{name}"))
    place, needed = rf"^algorithm\.policy_loss: 'other_outputs:{name}'", r"loss_L: shape \[2\]"
    with pytest.raises(ConfigError, match=f"{place} gave {reason},.*{needed}"):
        loss(policy_inputs())
    estimator = advantage(Choice(name="other_outputs:advantage_of_each_sequence"))
    with pytest.raises(ConfigError, match=r"advantages_L: shape \[1\].*advantages_L: shape \[2\]"):
        estimator(INPUTS, GIVEN)
    valued = advantage(Choice(name="other_outputs:without_returns"))
    with pytest.raises(ConfigError, match=r"returns_L: no tensor.*returns_L: shape \[2\]"):
        valued(INPUTS, GIVEN)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"share": torch.tensor(1.0)}, "the metric 'share' as shape []."),
        ({"share": 0.5}, "the metric 'share' as 0.5."),
        ({"share": "high"}, "the metric 'share' as 'high'."),
        ({3: torch.ones(2)}, "the metric 3 as shape [2]."),
        ({"loss": torch.ones(2)}, "the metric 'loss'."),
        ({"reward": torch.ones(2)}, "the metric 'reward'."),
        ({"reward/short": torch.ones(2)}, "the metric 'reward/short'."),
        ({"entropy": torch.ones(2)}, "the metric 'entropy'."),
        ({"mismatch/k3": torch.ones(2)}, "the metric 'mismatch/k3'."),
        ({"correction": torch.ones(2)}, "the metric 'correction'."),
        (None, "None as `metrics`"),
    ],
)
def test_a_metric_that_cannot_be_added_up_is_refused(
    metrics: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_new_loss.py").write_text(NEW_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    loss = policy_loss(Choice(name="my_new_loss:with_metrics"))
    inputs = policy_inputs()
    monkeypatch.setattr(sys.modules["my_new_loss"], "METRICS", {"share": torch.ones(2)})
    assert loss(inputs).metrics["share"].tolist() == [1, 1]
    monkeypatch.setattr(sys.modules["my_new_loss"], "METRICS", metrics)
    with pytest.raises(ConfigError, match=re.escape(f"'my_new_loss:with_metrics' gave {reason}")):
        loss(inputs)


@pytest.mark.parametrize(
    ("function", "raised", "last_line"),
    [
        ("looks_up", "KeyError: 'beta'", 'return options["beta"]'),
        ("leaves", "SystemExit: 3", "sys.exit(3)"),
    ],
)
def test_an_error_in_a_users_function_is_reported_with_its_lines(
    function: str, raised: str, last_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    loss = policy_loss(Choice(name=f"my_raising:{function}"))
    with pytest.raises(FunctionFailed) as caught:
        loss(policy_inputs())
    first, *lines = str(caught.value).splitlines()
    place = f"algorithm.policy_loss: 'my_raising:{function}'"
    assert first.startswith(place) and first.endswith(f" {raised}")
    assert re.match(r'  File "\S+/my_raising\.py", line \d+, ', lines[0])
    assert any(line.strip() == last_line for line in lines)
    assert "plimsoll/algorithm/choice.py" not in str(caught.value)
    assert caught.value.exit_code == 1
    pickle.loads(pickle.dumps(caught.value))  # noqa: S301  it crosses processes


def test_a_function_that_writes_into_its_inputs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelihood is computed from a divergence's inputs afterwards."""
    (tmp_path / "my_raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    inputs = DivergenceInputs(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"'my_raising:overwrites' changed"):
        divergence(Choice(name="my_raising:overwrites"))(inputs)
    divergence(Choice(name="forward_kl"))(inputs)


def test_ctrl_c_and_refusals_in_a_loss_are_raised_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        policy_loss(Choice(name="my_raising:is_interrupted"))(policy_inputs())
    with pytest.raises(ConfigError, match=r"^dual_clip is 0\.5"):
        policy_loss(Choice(name="my_raising:refuses"))(policy_inputs())


def test_a_loss_without_a_gradient_is_refused_if_inputs_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train with a gradient of 0, to the end."""
    (tmp_path / "my_new_loss.py").write_text(NEW_LOSS)
    (tmp_path / "my_pairs.py").write_text(NEW_PREFERENCE_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    of_tokens = policy_loss(Choice(name="my_new_loss:detached"))
    with pytest.raises(ConfigError, match=r"^algorithm\.policy_loss: .*without a gradient"):
        of_tokens(policy_inputs())
    assert of_tokens(policy_inputs(learns=False)).loss_L.tolist() == [1, 6]
    of_pairs = preference_loss(Choice(name="my_pairs:detached"))
    chosen_P = torch.zeros(0, requires_grad=True)
    none = PairValues(torch.zeros(0), torch.zeros(0))
    inputs = PreferenceLossInputs(PairValues(chosen_P, chosen_P), none, pairs=1)
    with pytest.raises(ConfigError, match=r"^algorithm\.loss: 'my_pairs:detached' .*gradient"):
        of_pairs(inputs)
    free = preference_loss(Choice(name="my_pairs:reference_free"))
    assert free(inputs).loss.requires_grad


@pytest.mark.parametrize("dual_clip", [1.0, 0.5])
def test_bounds_are_checked_before_anything_runs(dual_clip: float) -> None:
    with pytest.raises(ConfigError, match=rf"'dual_clip' of 'clip' is {dual_clip}.*than 1"):
        policy_loss(Choice(name="clip", options={"dual_clip": dual_clip}))


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.policy_loss: No .* 'clp'.*mean 'clip'"):
        policy_loss(Choice(name="clp"))
    with pytest.raises(ConfigError, match=r"^algorithm\.advantage: No .*'gea'.*: .*gae"):
        advantage(Choice(name="gea"))


def test_the_key_that_chose_it_is_named() -> None:
    wrong = Choice(name="dpo", options={"beat": 0.1})
    with pytest.raises(ConfigError, match=r"^algorithm\.loss: 'dpo' .*'beat'.*'beta'"):
        preference_loss(wrong)


def documented(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a file of docs/extend.md, unchanged, as a module and return its name."""
    page = (Path(__file__).parents[3] / "docs" / "extend.md").read_text()
    [code] = re.findall(rf"```python\n(# {file}\.py\n.*?)```", page, re.DOTALL)
    (folder / f"documented_{file}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    return f"documented_{file}"


def test_the_policy_functions_of_the_documents_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = documented("my_losses", tmp_path, monkeypatch)
    inputs = policy_inputs()
    policy = inputs.policy
    output = policy_loss(Choice(name=f"{module}:reinforce"))(inputs)
    expected = -policy.logprobs_L.detach() * policy.advantages_L
    assert output.loss_L.tolist() == pytest.approx(expected.tolist())
    # Groups of 1, 2, 0 (mean 1) and 4, 1 (mean 2.5), of 1, 2, 1, 1 and 1 tokens.
    given_inputs = AdvantageInputs(
        torch.tensor([[1.0], [2.0], [0.0], [4.0], [1.0]], dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        torch.zeros(6),
        torch.tensor([0, 1, 3, 4, 5, 6]),
    )
    estimate = advantage(Choice(name=f"{module}:sign_of_group"))
    signs = estimate(given_inputs, {"group_S": torch.tensor([3, 3, 3, 8, 8])}).advantages_L
    assert signs.tolist() == [0, 1, 1, -1, 1, -1]
    # The roots of 0.25, 1, 2.25 and 9, of which the last is over 2.
    ratios = torch.tensor([0.25, 1.0, 2.25, 9.0]).log()
    weigh = correction(Choice(name=f"{module}:square_root"))
    weights = weigh(CorrectionInputs(ratios, torch.tensor([0, 4]))).weights_L
    assert weights.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_the_preference_loss_of_the_documents_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/extend.md: exp(-0.1 * (1 - -1)) for the pair of log-ratios 1 and -1."""
    module = documented("my_pairs", tmp_path, monkeypatch)
    loss = preference_loss(Choice(name=f"{module}:exponential"))
    one = torch.tensor([1.0])
    inputs = PreferenceLossInputs(PairValues(2 * one, -2 * one), PairValues(one, one), pairs=1)
    output = loss(inputs, PairValues(one, -one))
    assert output.loss.item() == pytest.approx(math.exp(-0.2))
    assert output.metrics["accuracy"] == 1
