"""SFT on two ranks is SFT on one, also where a run goes on with fewer ranks, and then with more."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from commands import SFT, Outcome, column, metrics, run, run_here, write_config, write_task
from safetensors.torch import load_file

from plimsoll.run.json_lines import read_rows

pytestmark = pytest.mark.engine

PARTS = ((5, 2, 2, 2), (10, 1, 0, 1), (15, 2, 3, 1))
"""Until which step with how many ranks (two on Ray, one in this process), at which ZeRO stage, and
how many ranks share a pack. A step takes 7 of 16 rows, so each part ends within an epoch."""

ODD = {
    "HOME": "/dev/null",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
"""What a container's user without a home, and a command that mpirun or torchrun started, have."""


def run_oddly(home: Path, *words: str) -> Outcome:
    return run(home, *words, environment=ODD)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks_and_with_more(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    """The first two ranks are on a Ray of their own, and the last on one that others share."""
    write_task(tmp_path)
    config = copy.deepcopy(SFT)
    config["run"] |= {"steps": PARTS[-1][0], "eval_every": 5, "save_every": None}
    config["actor"]["optimizer"] = {"learning_rate": 0.003, "warmup_steps": 4}
    write_config(tmp_path, "sft", config)
    assert run_here(tmp_path, "sft", "sft.yaml", "--run.directory", "whole").code == 0
    done = 0
    for steps, ranks, stage, shards in PARTS:
        command = run_here if done else run_oddly
        own = ("--cluster.where", "ray" if ranks > 1 else "local")
        where = shared_ray if done and ranks > 1 else own
        flags = f"--run.directory moved --run.resume auto --run.steps {steps} "
        flags += f"--cluster.ranks {ranks} --actor.zero.stage {stage} "
        flags += f"--cluster.sequence_parallel {shards}"
        outcome = command(tmp_path, "sft", "sft.yaml", *where, *flags.split())
        assert outcome.code == 0, outcome.err
        assert (f"resumed after step {done} from" in outcome.out) == (done > 0)
        done = steps
    check_same_steps(tmp_path)
    one, other = (load_file(tmp_path / d / "model/model.safetensors") for d in ("whole", "moved"))
    start = load_file(tmp_path / "model/model.safetensors")
    for name, tensor in one.items():
        assert (other[name] - tensor).norm() < 1e-3 * (tensor - start[name]).norm(), name


def check_same_steps(home: Path) -> None:
    whole, moved = metrics(home / "whole"), metrics(home / "moved")
    assert [row["step"] for row in moved] == [row["step"] for row in whole]
    for name in ("loss", "grad_norm", "eval/loss", "learning_rate", "epoch", "tokens"):
        assert column(whole, name), name
        np.testing.assert_allclose(column(moved, name), column(whole, name), rtol=1e-4)
    ledger = read_rows(home / "moved" / "ledger.jsonl")
    on_two = {row["step"] for row in ledger if row["process"] == "rank 1"}
    assert {1, 11} <= on_two <= {*range(1, 6), *range(11, 16)}
