"""4-bit weights that ZeRO-3 gathers, and that stay until the backward."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.memory.items import Moment
from plimsoll.memory.price.kept_codes import kept_codes
from plimsoll.memory.price.lifetimes import job_moments, lifetime
from plimsoll.memory.price.zero_states import Counts, ZeroSizes

COUNTS = Counts(trained=10**8, frozen=10**9, largest=10**6, element=2, quantized=68 * 10**9)
SIZES = ZeroSizes(stage=3, ranks=8, accumulate=4, bucket=10**8, live=10**9)


def test_they_are_a_quarter_of_the_parameters_as_16_bits_beside_what_is_live() -> None:
    (kept,) = kept_codes(COUNTS, SIZES)
    assert kept.bytes == 34 * 10**9 - 2 * 10**9
    (few,) = kept_codes(replace(COUNTS, quantized=10**9), SIZES)
    assert few.bytes == 0


def test_only_a_role_that_learns_and_gathers_keeps_them() -> None:
    for sizes in (replace(SIZES, stage=2), replace(SIZES, ranks=1)):
        assert list(kept_codes(COUNTS, sizes)) == []
    assert list(kept_codes(replace(COUNTS, trained=0), SIZES)) == []
    assert len(list(kept_codes(COUNTS, replace(SIZES, ranks=1, offload_weights=True)))) == 1


def test_they_are_there_from_the_forward_to_the_end_of_the_backward() -> None:
    (kept,) = kept_codes(COUNTS, SIZES)
    moments = job_moments(("actor",), ("score", "train_actor", "save"))
    assert lifetime(kept.life, "actor", "train_actor", moments) == {
        Moment("train_actor", instant) for instant in ("forward_backward", "backward", "reduce")
    }
