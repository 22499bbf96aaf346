"""A reference that scores before the actor is loaded: its log-probs are those of one beside the
actor, and what a file has is not scored again, in another order and after an interruption either.
"""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from choice import slow
from commands import metrics
from kto_cases import PAIRS, PRECOMPUTE, STEPS, train_here, write_labelled

from plimsoll.cluster.protocol import Group
from plimsoll.records import Floats
from plimsoll.resolve.roles import RoleName
from plimsoll.run.stored_logprobs import read_logprobs
from plimsoll.train.update import Packs, log_probs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("labelled")
    write_labelled(home)
    return home


@pytest.mark.parametrize(
    ("job", "config"), [slow("kto", "kto"), ("dpo", "dpo"), ("kto", "adapted")]
)
def test_stored_log_probs_are_the_live_ones_bit_for_bit(home: Path, job: str, config: str) -> None:
    """The jobs are KTO, DPO, and DPO whose reference is the actor without its adapter; over two
    epochs, held-out rows too."""
    flags = (*PAIRS, "--run.steps", "6")
    live, stored = f"{config}-live", f"{config}-stored"
    assert train_here(home, live, *flags, job=job, config=config) == 0
    assert train_here(home, stored, *flags, *PRECOMPUTE, job=job, config=config) == 0
    assert metrics(home / live) == metrics(home / stored)
    assert "eval/loss" in metrics(home / live)[-1]
    assert "seconds/precompute" in (home / stored / "metrics.jsonl").read_text()


def test_the_file_serves_other_runs_and_resumes_and_is_refused_to_another_reference(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*PRECOMPUTE, "--reference_logprobs.path", "kept.parquet", "--run.save_every", "2")
    assert train_here(home, "first", *flags) == 0
    told = "the reference scores 56 of 56 sequences; their log-probs go to kept.parquet"
    assert told in capsys.readouterr().out
    assert train_here(home, "second", *flags) == 0
    assert "log-probs are those of kept.parquet" in capsys.readouterr().out
    shutil.rmtree(home / "second" / "checkpoints" / "step-000004")
    shutil.rmtree(home / "second" / "model")
    assert train_here(home, "second", *flags, "--run.resume", "auto") == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert metrics(home / "first") == metrics(home / "second")
    refused = {
        "another reference than model": ("--reference.model.path", "model"),
        "another reference than other in bfloat16": ("--reference.model.dtype", "bfloat16"),
    }
    for words, change in refused.items():
        capsys.readouterr()
        assert train_here(home, "refused", *flags, *change) == 2
        assert words in capsys.readouterr().err
        shutil.rmtree(home / "refused")


@dataclass
class Scorer:
    """Lets a reference score before the actor is loaded, and presses Ctrl-C while it does."""

    sequences: list[int]
    """How many it was given, call by call."""
    interrupted: int | None = None
    """In which call."""

    def __call__(self, role: RoleName, packs: Packs, group: Group) -> Floats:
        self.sequences.append(sum(int((p.samples_S >= 0).sum()) for own in packs for p in own))
        if len(self.sequences) == self.interrupted:
            signal.raise_signal(signal.SIGINT)
        return log_probs(role, packs, group)


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Scorer:
    scorer = Scorer([])
    monkeypatch.setattr("plimsoll.train.reference.log_probs", scorer)
    return scorer


def test_another_order_of_rows_has_only_what_is_new_scored(home: Path, scorer: Scorer) -> None:
    """New are prompts with other responses. The rows are the same, and all that is held out."""
    shared = (*PRECOMPUTE, "--reference_logprobs.path", "any-order.parquet")
    assert train_here(home, "in-order", *shared) == 0
    before = read_logprobs(home / "any-order.parquet").logprobs
    scorer.sequences.clear()
    other = ("--data.shuffle", "true", "--batch.sequences", "7")
    assert train_here(home, "other-order", *shared, *other) == 0
    after = read_logprobs(home / "any-order.parquet").logprobs
    assert before.items() < after.items()
    assert len(scorer.sequences) == STEPS and max(scorer.sequences) <= 7
    assert train_here(home, "other-live", *other) == 0
    for row, want in zip(metrics(home / "other-order"), metrics(home / "other-live"), strict=True):
        assert row == pytest.approx(want, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("job", ["kto", slow("dpo")])
def test_scoring_that_is_interrupted_goes_on_where_it_was(
    home: Path, job: str, scorer: Scorer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, and nothing is scored twice."""
    flags = (*PAIRS, *PRECOMPUTE, "--run.steps", "6", "--run.eval_every", "null")
    whole, stopped = home / f"{job}-whole", home / f"{job}-stopped"
    assert train_here(home, whole.name, *flags, job=job, config=job) == 0
    at_once = [*scorer.sequences]
    scorer.sequences.clear()
    scorer.interrupted = 3
    assert train_here(home, stopped.name, *flags, job=job, config=job) == 130
    kept = Path(stopped.name) / "reference-logprobs.parquet"
    told = f"stopped while the reference scored, as asked; what it scored is in {kept}. To go on: "
    assert f"{told}run the same command\n" in capsys.readouterr().err
    assert scorer.sequences == at_once[:3] and not (stopped / "metrics.jsonl").exists()
    assert train_here(home, stopped.name, *flags, job=job, config=job) == 0
    assert scorer.sequences == at_once
    assert read_logprobs(home / kept) == read_logprobs(whole / kept.name)
    assert metrics(stopped) == metrics(whole)
