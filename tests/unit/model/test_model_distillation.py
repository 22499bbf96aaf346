"""The distilling head against the plain computation on full logits, by hand, and in its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from plimsoll.algorithm.choice import divergence
from plimsoll.config.base import Choice
from plimsoll.model.distillation import Distilled, Lesson, distil
from plimsoll.model.logit_chunks import BLOCK_ELEMENTS_CPU, LogitForm

torch.set_num_threads(1)

CHOICES = {
    "forward_kl": Choice(name="forward_kl"),
    "reverse_kl": Choice(name="reverse_kl"),
    "jsd": Choice(name="jsd", options={"beta": 0.3}),
}
TOKENS = 37
"""Of the step: more than the rows of any case."""


@dataclass(frozen=True)
class Case:
    """A student's leaves, its targets, and a teacher's states and head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None = None

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def lesson(self, name: str, temperature: float, share: float, form: LogitForm) -> Lesson:
        return Lesson(
            hidden_L_H=self.teacher_hidden,
            weight_VH=self.teacher_weight,
            bias_V=self.teacher_bias,
            form=form,
            divergence=divergence(CHOICES[name]),
            temperature=temperature,
            nll_share=share,
            tokens=TOKENS,
        )


def make_case(
    rows: int, width: int, vocab: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Case:
    """The teacher is one wider, and has three tokens more, which the student's head lacks."""
    generator = torch.Generator().manual_seed(rows * 1000 + width * 10 + vocab)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return Case(
        draw(rows, width).requires_grad_(),
        draw(vocab, width).requires_grad_(),
        draw(vocab).requires_grad_() if bias else None,
        targets,
        draw(rows, width + 1),
        draw(vocab + 3, width + 1),
        draw(vocab + 3) if bias else None,
    )


def definition(name: str, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence of each row, by the papers' sums over the vocabulary."""
    p, q = teacher.softmax(1), student.softmax(1)
    if name == "forward_kl":
        return (p * (p / q).log()).sum(1)
    if name == "reverse_kl":
        return (q * (q / p).log()).sum(1)
    beta = CHOICES["jsd"].options["beta"]
    assert isinstance(beta, float)
    mixed = beta * p + (1 - beta) * q
    return beta * (p * (p / mixed).log()).sum(1) + (1 - beta) * (q * (q / mixed).log()).sum(1)


def full(
    case: Case,
    name: str,
    temperature: float,
    share: float,
    form: LogitForm,
    from_teacher: LogitForm,
) -> Distilled:
    """Return loss and gradients from all logits of both models, in float64, by autograd."""
    bias = None if case.bias is None else case.bias.double()
    logits = torch.nn.functional.linear(case.hidden.double(), case.weight.double(), bias)
    student = capped(logits, form)
    wide, cut = case.teacher_weight.double(), slice(len(case.weight))
    wide_bias = None if case.teacher_bias is None else case.teacher_bias.double()[cut]
    logits = torch.nn.functional.linear(case.teacher_hidden.double(), wide[cut], wide_bias)
    teacher = capped(logits, from_teacher)
    found = definition(name, student / temperature, teacher / temperature).sum() / TOKENS
    nll = torch.nn.functional.cross_entropy(student, case.targets, reduction="sum") / TOKENS
    return Distilled((1 - share) * temperature**2 * found + share * nll, found, nll)


def capped(logits: Tensor, form: LogitForm) -> Tensor:
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    return logits * form.scale


def check_equal(ours: Distilled, plain: Distilled, leaves: list[Tensor], tolerance: float) -> None:
    for got, want in zip(ours, plain, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    expected = torch.autograd.grad(plain.loss * 3, leaves)
    for got, want in zip(torch.autograd.grad(ours.loss * 3, leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=percent(60))
@given(
    name=st.sampled_from(sorted(CHOICES)),
    rows=st.integers(0, 9),
    width=st.integers(1, 6),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 11),
    temperature=st.sampled_from([1.0, 2.0, 0.7]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    form=st.sampled_from([LogitForm(), LogitForm(1.7), LogitForm(0.5, 2.0)]),
    bias=st.booleans(),
)
def test_equals_the_full_computation(
    name: str,
    rows: int,
    width: int,
    vocab: int,
    chunk: int,
    temperature: float,
    share: float,
    form: LogitForm,
    bias: bool,
) -> None:
    case, from_teacher = make_case(rows, width, vocab, bias), LogitForm(0.9, 3.0)
    lesson = case.lesson(name, temperature, share, from_teacher)
    ours = distil(
        *(case.hidden, case.weight, case.targets, lesson),
        bias_V=case.bias,
        chunk=chunk,
        form=form,
    )
    plain = full(case, name, temperature, share, form, from_teacher)
    check_equal(ours, plain, case.leaves(), 1e-5)


def test_hand_computed_divergences() -> None:
    # The student gives 1/2 and 1/2, the teacher 3/4 and 1/4.
    wanted = {
        "forward_kl": 0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        "reverse_kl": 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
        "jsd": 0.3 * (0.75 * math.log(0.75 / 0.575) + 0.25 * math.log(0.25 / 0.425))
        + 0.7 * (0.5 * math.log(0.5 / 0.575) + 0.5 * math.log(0.5 / 0.425)),
    }
    case = Case(
        torch.zeros(1, 1, requires_grad=True),
        torch.zeros(2, 1),
        None,
        torch.tensor([0]),
        torch.ones(1, 1),
        torch.tensor([[math.log(3)], [0.0]]),
    )
    for name, value in wanted.items():
        lesson = case.lesson(name, 1.0, 0.25, LogitForm())
        found = distil(case.hidden, case.weight, case.targets, lesson, chunk=8, form=LogitForm())
        assert float(found.divergence) * TOKENS == pytest.approx(value, rel=1e-5)
        assert float(found.nll) * TOKENS == pytest.approx(math.log(2))
        loss = 0.75 * value + 0.25 * math.log(2)
        assert float(found.loss.detach()) * TOKENS == pytest.approx(loss)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name: str) -> None:
    case = make_case(5, 4, 50)
    same = Case(case.hidden, case.weight, None, case.targets, case.hidden, case.weight)
    lesson = same.lesson(name, 2.0, 0.0, LogitForm())
    found = distil(case.hidden, case.weight, case.targets, lesson, chunk=2, form=LogitForm())
    assert abs(float(found.loss.detach())) < 1e-6
    for gradient in torch.autograd.grad(found.loss, case.leaves()):
        assert gradient.abs().max() < 1e-6


def test_bfloat16_computes_softmaxes_in_fp32_and_frozen_heads_get_no_gradient() -> None:
    case = make_case(16, 8, 64, dtype=torch.bfloat16)
    case.weight.requires_grad_(False)
    lesson = case.lesson("forward_kl", 1.0, 0.5, LogitForm())
    ours = distil(case.hidden, case.weight, case.targets, lesson, chunk=5, form=LogitForm())
    plain = full(case, "forward_kl", 1.0, 0.5, LogitForm(), LogitForm())
    check_equal(ours, plain, [case.hidden], 0.01)  # the logits are rounded to 8 bits
    ours = distil(case.hidden, case.weight, case.targets, lesson, chunk=5, form=LogitForm())
    ours.loss.backward()
    assert case.weight.grad is None and case.hidden.grad is not None


@pytest.mark.parametrize(("name", "temperature"), [("forward_kl", 1.0), ("jsd", 2.0)])
def test_holds_a_chunk_of_logits_of_each(name: str, temperature: float) -> None:
    rows, width, vocab, chunk = 1024, 16, 8192, 512
    case = make_case(rows, width, vocab)
    two_chunks = 2 * chunk * vocab * 4
    own_gradients = (case.hidden.numel() + case.weight.numel()) * 4
    scratch = 8 * BLOCK_ELEMENTS_CPU * 4 + 16 * rows * 4
    bound = two_chunks + own_gradients + scratch
    assert bound < 1.5 * two_chunks  # so a third chunk would not pass
    assert bound < 2 * rows * vocab * 4  # nor would all logits
    lesson = case.lesson(name, temperature, 0.5, LogitForm())
    tracker = LiveBytes()
    with tracker:
        ours = distil(case.hidden, case.weight, case.targets, lesson, chunk=chunk, form=LogitForm())
        torch.autograd.grad(ours.loss, case.leaves())
    assert two_chunks <= tracker.peak <= bound
