"""No tensor is made on the wrong device: forward and backward passes on a device that is not the
CPU, on fake tensors, for which PyTorch checks the device of every operation's inputs.

This shows where tensors lie, and nothing else: no number is computed, and no GPU has run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from decided import decided_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.config.base import Choice
from plimsoll.config.choice import built_in_names
from plimsoll.config.engine import AdapterConfig, ModelConfig
from plimsoll.data.packing import pack_one
from plimsoll.model.adapters import add_adapter, plain_weight
from plimsoll.model.attention import SDPA, VARLEN, register_packed_attention
from plimsoll.model.checkpointing import checkpoint_layers
from plimsoll.model.files import hf_state_names
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.policy import HeadForm, PolicyModel, TeacherModel, ValueModel
from plimsoll.model.tiny import Family, tiny_config
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    RETURNS,
    SAMPLER_LOGPROBS,
    VALUES,
    BatchCounts,
    Floats,
    Pack,
    PackColumns,
    Sample,
)
from plimsoll.resolve.choices import needs_reference
from plimsoll.trainer.objectives import (
    MARGIN,
    SEQUENCE_REFERENCE,
    STEP_LABELS,
    TEACHER,
    DistillationObjective,
    NllObjective,
    PolicyObjective,
    PreferenceObjective,
    ProcessObjective,
    RewardObjective,
    ValueObjective,
    teacher_forward,
)
from plimsoll.trainer.protocol import PackToLearn
from plimsoll.trainer.zero.masters import Average
from plimsoll.trainer.zero.optimizer import begin_moments

CARD = torch.device("meta")
"""Not the CPU; a build of PyTorch for CPU has no fake tensors on `cuda` that autograd can use."""
LENGTHS = (7, 4, 12, 7)
PAIRS = len(LENGTHS) // 2
COUNTS = BatchCounts(100, len(LENGTHS))
MODEL = decided_model(path="none", dtype="float32", head_chunk=5)
VOCABULARY = 64


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [Sample(rng.integers(0, VOCABULARY, n), np.arange(n) > 1) for n in LENGTHS]


def a_pack(shared: Sequence[int] | None = None) -> Pack:
    return pack_one(samples(), range(len(LENGTHS)), None if shared is None else np.array(shared))


PACK = a_pack()
LEARNED = len(PACK.targets_L)


def on_card(module: nn.Module) -> nn.Module:
    """The module with fake tensors on the card in place of its own; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = made.setdefault(id(tensor), there(tensor))
    return module


def there(tensor: Tensor) -> Tensor:
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=CARD)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def language_model(auto_class: Any, family: Family, attention: str, model: ModelConfig) -> Any:
    register_packed_attention()
    config = tiny_config(family, True, vocab=VOCABULARY, window=4)
    config.num_labels = 1
    lm = auto_class.from_config(config, attn_implementation=attention)
    checkpoint_layers(lm, model)
    return lm.train()


def a_policy(
    family: Family = "qwen2", attention: str = SDPA, model: ModelConfig = MODEL
) -> PolicyModel:
    lm = language_model(AutoModelForCausalLM, family, attention, model)
    softcap = getattr(lm.config, "final_logit_softcapping", None)
    return PolicyModel(lm, HeadForm(model.head_chunk, LogitForm(softcap=softcap), 0.7))


def a_value_model() -> ValueModel:
    return ValueModel(language_model(AutoModelForSequenceClassification, "qwen2", SDPA, MODEL))


@dataclass(frozen=True)
class Direct:
    """An `Engine` whose module is its own."""

    module: nn.Module

    def forward(self, *inputs: object, **options: object) -> Any:
        return self.module(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        yield {name: self.module.get_parameter(name).detach() for name in names}


def learn(module: nn.Module, objective: Any, columns: PackColumns, pack: Pack = PACK) -> None:
    """A micro-batch's gradient, which must reach all that is trained."""
    output = objective.loss(Direct(module), PackToLearn(pack, columns, COUNTS, CARD))
    output.loss.backward()
    assert output.loss.device == CARD
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.device == CARD, name


def some(count: int) -> Floats:
    return np.zeros(count, dtype=np.float32)


POLICY = PolicyObjective(
    Choice(name="clip", options={"dual_clip": 3.0}),
    correction=Choice(name="mask"),
    terms=PolicyTerms(
        aggregation="sequences",
        constant=8,
        kl_estimator="k3",
        kl_coefficient=0.1,
        ratio_corrected=True,
        entropy_bonus=0.01,
    ),
)
POLICY_COLUMNS = {column: some(LEARNED) for column in COLUMNS.values() if column.in_policy_loss}
BARE_COLUMNS = {ADVANTAGES: some(LEARNED), SAMPLER_LOGPROBS: some(LEARNED)}
POLICY_LOSSES = [Choice(name=name) for name in built_in_names("plimsoll.algorithm.policy_loss")]


@pytest.mark.parametrize("checkpointing", [False, "selective"])
@pytest.mark.parametrize("shared", [None, (0, 2, 0, 2)], ids=["apart", "shared"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen2", SDPA), ("qwen2", VARLEN), ("mistral", VARLEN), ("gemma2", SDPA), ("gemma3", SDPA)],
)
def test_a_policy_with_every_attention(
    family: Family, attention: str, shared: Sequence[int] | None, checkpointing: bool | str
) -> None:
    model = MODEL.model_copy(update={"gradient_checkpointing": checkpointing})
    pack = a_pack(shared)
    columns = {column: some(len(pack.targets_L)) for column in POLICY_COLUMNS}
    policy = a_policy(family, attention, model)
    with FakeTensorMode():
        on_card(policy)
        learn(policy, POLICY, columns, pack)


REFERENCE = {SEQUENCE_REFERENCE: some(len(LENGTHS))}
PREFERENCES = [Choice(name=name) for name in built_in_names("plimsoll.algorithm.preference_loss")]


@pytest.mark.parametrize(
    ("objective", "columns"),
    [
        (NllObjective(), {}),
        (POLICY, POLICY_COLUMNS),
        (POLICY, BARE_COLUMNS),
        *((replace(POLICY, policy_loss=loss), POLICY_COLUMNS) for loss in POLICY_LOSSES),
        *(
            (
                PreferenceObjective(loss, 0.1),
                REFERENCE if needs_reference(loss) else {},
            )
            for loss in PREFERENCES
        ),
    ],
    ids=lambda case: type(case).__name__,
)
def test_every_objective_of_a_policy(objective: Any, columns: PackColumns) -> None:
    """KTO's is left out: it picks elements by their values, which fake tensors do not have."""
    policy = a_policy()
    with FakeTensorMode():
        learn(on_card(policy), objective, columns)


@pytest.mark.parametrize(
    ("objective", "columns"),
    [
        (ValueObjective(0.2), {VALUES: some(LEARNED), RETURNS: some(LEARNED)}),
        (ProcessObjective(), {STEP_LABELS: some(LEARNED)}),
        *(
            (RewardObjective(Choice(name=name), 0.01), {MARGIN: some(2 * PAIRS)})
            for name in ("log_sigmoid", "log_exp")
        ),
    ],
    ids=lambda case: type(case).__name__,
)
def test_every_objective_of_a_value_model(objective: Any, columns: PackColumns) -> None:
    values = a_value_model()
    with FakeTensorMode():
        learn(on_card(values), objective, columns)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_and_its_teacher_whose_states_wait_on_the_host(divergence: str) -> None:
    objective = DistillationObjective(Choice(name=divergence), 2.0, 0.3)
    policy = a_policy()
    lm = language_model(AutoModelForCausalLM, "qwen2", SDPA, MODEL)
    with FakeTensorMode():
        teacher = Direct(on_card(TeacherModel(lm, LogitForm())))
        (columns,) = teacher_forward(teacher, [PACK], CARD)  # type: ignore[arg-type]
        assert columns[TEACHER].hidden_L_H.is_cpu
        learn(on_card(policy), objective, columns)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_learns_and_is_merged_where_it_lies(dora: bool) -> None:
    config = AdapterConfig(rank=4, alpha=8.0, dora=dora)
    policy = a_policy()
    add_adapter(policy, config, "none", seed=0)
    with FakeTensorMode():
        on_card(policy)
        learn(policy, NllObjective(), {})
        assert {plain_weight(policy, name).device for name in hf_state_names(policy)} == {CARD}


def test_averages_and_moments_lie_where_the_masters_do() -> None:
    with FakeTensorMode():
        masters = [torch.empty(30, device=CARD), torch.empty(5, device=CARD)]
        average = Average(masters, 0.9)
        average.add(masters, 3)
        average.swap(masters)
        optimizer = torch.optim.AdamW(masters)
        rows = begin_moments(optimizer, masters, 3)
        found = [*average.rows, *masters, *(row for of in rows.values() for row in of)]
        steps = [optimizer.state[master]["step"] for master in masters]
        assert {tensor.device for tensor in (*found, *steps)} == {CARD}


def test_a_mistake_would_be_seen() -> None:
    """Where PyTorch let the devices mix, the tests above would say nothing."""
    policy = a_policy()
    with FakeTensorMode():
        on_card(policy)
        micro_batch = PackToLearn(PACK, BARE_COLUMNS, COUNTS, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="on the same device"):
            POLICY.loss(Direct(policy), micro_batch)  # type: ignore[arg-type]
