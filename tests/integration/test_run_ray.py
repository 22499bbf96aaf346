"""PPO on Ray: two ranks and two vLLM engines; a critic with ranks of its own."""

from __future__ import annotations

import copy
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as parquet
import pytest
import torch
from commands import (
    PPO,
    VLLM,
    Command,
    Outcome,
    column,
    main_lines,
    metrics,
    run_here,
    title,
    wait_for,
    write_config,
    write_task,
)
from listeners import listening
from safetensors.torch import load_file
from test_ledger_runs import check_rows, check_sane, expected
from transformers import AutoModelForCausalLM
from vllm_cases import started

from plimsoll.config.rollout import RolloutConfig
from plimsoll.data.order import DataOrder
from plimsoll.jobs import JOBS as COMMANDS
from plimsoll.resolve.load import load_spec
from plimsoll.run.ledger import read_ledger
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.trainer.checkpoint import read_weights

pytestmark = pytest.mark.engine

STEPS = 3


def divided_ppo() -> dict[str, Any]:
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": 2, "eval_every": 3}
    config["cluster"] |= {"where": "ray", "ranks": 2}
    config["rollout"] |= VLLM | {"engines": 2, "sync": {"rehearse": True}}
    for role in ("actor", "critic"):
        config[role]["zero"] = {"stage": 3, "optimizer_offload": "cpu"}
    config["algorithm"]["policy_loss"] = {"name": "own_loss.py:loss"}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ray")
    write_task(home)
    write_config(home, "ppo", divided_ppo())
    # The default one, by the path of a file, which every rank loads where the command was started.
    (home / "own_loss.py").write_text("from plimsoll.algorithm.policy_loss import clip as loss\n")
    return home


@pytest.fixture(scope="module")
def ppo(home: Path) -> Outcome:
    command, places = Command(home, "ppo", "ppo.yaml"), set()
    while command.process.poll() is None:
        for process in command.processes():
            with suppress(psutil.Error):
                found = listening([process])
                if name := title(process):  # else it has just ended
                    places |= {(name, address) for address, _ in found}
        time.sleep(1)
    (home / "places.json").write_text(json.dumps([*places]))
    outcome = command.finish()
    wait_for(lambda: not command.processes(), "the end of all processes of the run")
    return outcome


def test_ppo_on_two_ranks_and_two_vllm_engines(home: Path, ppo: Outcome) -> None:
    assert ppo.code == 0
    # CPU Adam is tried here where there is no card to relieve, and the run says so.
    assert ppo.err.startswith("warning offload-without-gpu: actor.zero.optimizer_offload")
    assert ppo.err.count("warning") == 1 and "rror" not in ppo.err
    assert [line.split("|")[0].strip() for line in main_lines(ppo.out)[:-2]] == [
        f"ppo: {STEPS} steps, written to ppo",
        *(f"ppo step {step}/{STEPS}" for step in range(STEPS + 1)),
    ]
    rows = metrics(home / "ppo")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(np.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        # Bounds of rounding in bfloat16; a wrong or stale weight gives several tenths.
        assert row["sync/logprob_gap"] < 0.02 and row["mismatch/abs"] < 0.02
        assert 0.8 < row["ratio"] < 1.2 and row["actor/grad_norm"] > 0


@pytest.mark.usefixtures("ppo")
def test_what_listens_is_in_the_table_of_security_and_on_loopback(home: Path) -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    table = page[page.index("| process | what listens |") :].split("\n\n")[0].splitlines()[2:]
    listed = {name for row in table for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    found: dict[str, set[str]] = {}
    for process, address in json.loads((home / "places.json").read_text()):
        match = re.match(r"(?:\S*/)?(?:python\S* -m |ray::|VLLM::)?(\w+)", process)
        found.setdefault(match[1] if match else process, set()).add(address)
    assert set().union(*found.values()) == {"127.0.0.1"}, found
    named = {name for name in found if not re.match("IDLE|python", name)}  # Ray's, at their start
    others = {"watch", "plan --open", "serve-reward"}  # they have tests of their own
    assert named == listed - others


@pytest.mark.usefixtures("ppo")
def test_trajectories_of_both_engines_are_all_there_once(home: Path) -> None:
    rows = {row["step"]: row for row in metrics(home / "ppo")}
    for step in range(1, STEPS + 1):
        table = parquet.read_table(home / "ppo" / "trajectories" / f"step-{step:06d}.parquet")
        rows_of_step = DataOrder(16, seed=0, shuffle=True).indices((step - 1) * 6, 6)
        expected = [(row, sample) for row in rows_of_step for sample in range(2)]
        found = (table[name].to_pylist() for name in ("prompt_index", "sample_index"))
        assert list(zip(*found, strict=True)) == expected
        assert set(table["weight_version"].to_pylist()) == {step - 1}
        assert rows[step]["reward"] == pytest.approx(np.mean(table["reward"].to_pylist()))
        # All have random numbers of their own, also where an epoch's end repeats a prompt.
        assert len({tuple(tokens) for tokens in table["tokens"].to_pylist()}) == 12


@pytest.mark.usefixtures("ppo")
def test_every_process_is_in_the_ledger(home: Path) -> None:
    rows = read_ledger(home / "ppo" / "ledger.jsonl")
    every = ["rollout", "score", "train_critic", "train_actor", "sync"]
    phases = {step: list(every) for step in range(1, STEPS + 1)} | {0: ["load", "sync", "eval"]}
    phases[2] += ["save"]
    phases[3] += ["eval", "save"]
    processes = ["controller", "rank 0", "rank 1", "engine 0", "engine 1", "node 0"]
    data = expected({0: ["data"]}, ["controller", "node 0"])
    check_rows(rows, expected(phases, processes) | data)
    check_sane(rows)


@pytest.mark.usefixtures("ppo")
def test_the_final_model_holds_the_trainers_masters(home: Path) -> None:
    checkpoint = home / "ppo" / "checkpoints" / f"step-{STEPS:06d}" / "actor"
    masters = read_weights(checkpoint, "master")
    saved = load_file(home / "ppo" / "model" / "model.safetensors")
    first = load_file(home / "model" / "model.safetensors")
    assert saved.keys() == first.keys()
    dtype = getattr(torch, load_spec(COMMANDS["ppo"], str(home / "ppo.yaml")).actor.model.dtype)
    for name, tensor in saved.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor.flatten(), masters[f"lm.{name}"].to(dtype))
        assert not torch.equal(tensor, first[name].to(dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("ppo")
def test_the_final_model_computes_the_same_in_vllm_and_in_transformers(home: Path) -> None:
    path = home / "ppo" / "model"
    rng = np.random.default_rng(0)
    probe = [rng.integers(0, 15, length) for length in (2, 9, 24)]
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rollout = RolloutConfig(dtype="float32").with_engine(VllmConfig(cpu_kv_cache_gib=0.25))
    spec = EngineSpec(0, str(path), 32, 1, "cpu", rollout)
    with started(spec) as (engine, loop):
        found = loop.run(engine.log_probs(probe))
    for tokens, log_probs in zip(probe, found, strict=True):
        row = torch.from_numpy(tokens)
        with torch.no_grad():
            scores = plain(row[None]).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, row[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)


@pytest.mark.slow
def test_a_critic_with_ranks_of_its_own_learns_the_same(
    home: Path, shared_ray: tuple[str, ...]
) -> None:
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": 2, "save_every": None}
    write_config(home, "critic", config)
    shared = run_here(home, "ppo", "critic.yaml", "--run.directory", "shared")
    own = run_here(
        home,
        *("ppo", "critic.yaml", "--run.directory", "own", *shared_ray),
        *("--cluster.critic_ranks", "2", "--cluster.threads", "1"),
    )
    assert (shared.code, own.code) == (0, 0), own.err
    together, apart = metrics(home / "shared"), metrics(home / "own")
    for name in ("reward", "kl", "value_loss", "critic/grad_norm", "actor/grad_norm", "ratio"):
        assert column(together, name), name
        found, wanted = column(apart, name), column(together, name)
        # The one has two threads, the other one: bfloat16 is rounded in another order.
        np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=5e-3)
