"""What reward models of both kinds share: loading, padding, and how well they are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from plimsoll.algorithm.calibration import Calibration
from plimsoll.engine.worker import Worker
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Sample
from plimsoll.spec.job import ConfigT
from plimsoll.train.from_data import RowT, Work
from plimsoll.train.loading import load_role
from plimsoll.train.reliability import draw_reliability


def load_scorer(work: Work[ConfigT, RowT], samples: Sequence[Sample]) -> None:
    """Load the model that learns on all ranks. samples: marked where scores are read."""
    load_role(work.cluster, work.spec, "actor")
    model = work.spec.actor.model
    padding = padding_token(load_tokenizer(model.path, model.trust_remote_code), samples)
    work.cluster.all(Worker.set_padding, "actor", padding)
    if padding is None:
        work.session.progress.note(
            "the tokenizer has no padding token, or scores are read at it: transformers will score "
            "one sequence at a time with the saved model"
        )


def padding_token(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> int | None:
    """The token that sequences may be padded with; None where there is no safe one.

    transformers' sequence classification reads the last token that is not the padding: a score that
    is read at the padding token (many tokenizers pad with the one that ends a turn) would be read
    one token too early.
    """
    read_at = {int(token) for sample in samples for token in sample.tokens[sample.learned]}
    token = tokenizer.pad_token_id
    return None if token is None or token in read_at else int(token)


def show_calibration(calibration: Calibration, of_what: str, output_png: Path) -> dict[str, float]:
    """Draw it; gives the calibration error as a metric."""
    draw_reliability(
        calibration.predicted_K,
        calibration.observed_K,
        calibration.counts_K,
        f"{of_what}; calibration error {calibration.error:.3f}",
        output_png,
    )
    return {"calibration_error": calibration.error}
