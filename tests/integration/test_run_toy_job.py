"""A job that is added from outside: its value, its loop and its line in the list are all it takes.

Command line, help, rules, dry run, plan, training, evaluation and `plimsoll eval` read the value.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SFT, metrics, run_here, write_config, write_task

from plimsoll.jobs import JOBS

JOB = '''
from plimsoll.config.run import SftBatch
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import TrainedRole
from plimsoll.config.run import JobConfig
from plimsoll.resolve.job import both
from plimsoll.resolve.columns import sft_source
from plimsoll.resolve.job import Evaluation, Job
from plimsoll.jobs.roles import actor
from plimsoll.resolve.job import sequences_of


class ParrotConfig(JobConfig):
    """Learning to repeat."""

    data: DataConfig
    """Rows."""
    batch: SftBatch = SftBatch()
    """What one step sees."""
    actor: TrainedRole
    """The parrot."""


JOB = Job(
    name="parrot",
    summary="learning to repeat",
    config=ParrotConfig,
    roles=lambda config: [actor(config.actor, "policy")],
    workload=lambda config: sequences_of(config.batch, config.data),
    columns=sft_source,
    evaluation=lambda config: Evaluation({"loss": "lowest"}),
    loop="parrot_loop",
    panels=(both("Loss", "nats per token", "loss"),),
)
'''

LOOP = """
from functools import partial

from plimsoll.data.dataset import load_samples
from plimsoll.data.packing import pack
from plimsoll.trainer.objectives import NllObjective
from plimsoll.records import BatchCounts
from plimsoll.train.from_data import learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import measure_likelihood, sum_nll
from plimsoll.train.update import OptimizerStep


def run(spec, planned):
    with work_on_rows(spec, planned, load_samples) as work:
        load_roles(work)
        learn_from_data(work, partial(learn, work), partial(evaluate, work))


def learn(work, batch):
    packs = pack(batch, work.cluster.streams, work.spec.workload.budget)
    return OptimizerStep(packs, BatchCounts.of(batch), NllObjective(), {})


def evaluate(work):
    total = sum_nll(work.spec, work.cluster, work.data.eval)
    return {"loss": total / BatchCounts.of(work.data.eval).tokens}


def measure(spec, directory):
    return measure_likelihood(spec, load_samples, "loss")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parrot.py").write_text(JOB)
    (tmp_path / "parrot_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    import parrot  # type: ignore[import-not-found]

    monkeypatch.setitem(JOBS, "parrot", parrot.JOB)
    write_task(tmp_path)
    path = write_config(
        tmp_path, "parrot", SFT | {"run": SFT["run"] | {"directory": "out", "steps": 4}}
    )
    path.write_text(f"# parrot\n{path.read_text()}")
    return tmp_path


def test_every_command_knows_it(home: Path) -> None:
    assert "plimsoll parrot CONFIG.yaml" in run_here(home, "--help").out
    assert "The parrot." in run_here(home, "parrot", "--help").out
    wrong = run_here(home, "parrot", "parrot.yaml", "--batch.micro_batch_tokens", "3")
    assert (wrong.code, "micro-batch-tokens" in wrong.err) == (4, True)
    best = ["--run.best.metric", "eval/accuracy"]
    assert run_here(home, "parrot", "parrot.yaml", *best).code == 2
    dry = run_here(home, "parrot", "parrot.yaml", "--dry-run")
    assert (dry.code, "verdict" in dry.out) == (0, True)
    assert run_here(home, "plan", "parrot.yaml", "--json").code == 0


def test_it_learns_and_is_measured(home: Path) -> None:
    assert run_here(home, "parrot", "parrot.yaml").code == 0
    rows = metrics(home / "out")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (home / "out" / "config.yaml").read_text().startswith("# parrot\n")
    assert run_here(home, "eval", "out").code == 0
    measured = json.loads((home / "out" / "eval.json").read_text())
    assert measured["loss"] == pytest.approx(rows[-1]["eval/loss"], rel=1e-4)
