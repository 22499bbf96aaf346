"""Seeded runs of every job, in one process and on two ranks of Ray: what they print and leave.

Recorded are all figures of learning, the SHA-256 of every tensor that is saved, what was sampled,
and the names and keys of everything else. Where two runs of the same source differ (`exact` is
False), only the structure is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calls import Call, alone
from configs import COLUMNS, changed, smallest, text
from left import digest
from plain import normal, write

OWN = """\
def mean(trajectory, *, scale: float = 1.0) -> float:
    return scale * float(sum(trajectory.response_tokens)) / len(trajectory.response_tokens) / 288

def broken(trajectory) -> float:
    return 1 / 0

def wrong(inputs, reference):
    return inputs.logprobs
"""
_LOCAL = {"where": "local", "device": "cpu", "threads": 1}
_RAY = {"where": "ray", "device": "cpu", "threads": 1, "ranks": 2}
_ADAPTER = {"rank": 4, "alpha": 8.0}
_OTHER = {"path": "other", "dtype": "float32"}
_STAGE_3 = {"stage": 3}
_OFFLOADED = {"stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"}
_SAMPLING = {"max_new_tokens": 12}
_ENGINE = {"transformers": {}, "sampling": _SAMPLING}
_VLLM = {"vllm": {"cpu_kv_cache_gib": 0.25}, "sampling": _SAMPLING}
_NO_COLUMNS = {
    f"data.{part}.{column}": None for part in ("train", "eval") for column in COLUMNS["sft"]
}


@dataclass(frozen=True)
class Run:
    """changes: to the job's config here, by dotted keys. then: commands after it, in which RUN is
    its directory. exact: the same in every bit when it is run again."""

    name: str
    job: str
    changes: Mapping[str, Any]
    then: Sequence[str] = ()
    exact: bool = True

    @property
    def on_ray(self) -> bool:
        cluster: Mapping[str, Any] = self.changes.get("cluster", _LOCAL)
        return bool(cluster["where"] == "ray")


_EVAL = "eval RUN --out RUN-eval"
RUNS = (
    Run(
        "sft-local",
        "sft",
        {
            **_NO_COLUMNS,
            "data.train.messages": "messages",
            "data.eval.messages": "messages",
            "data.chat_template": None,
            "data.system": "be brief",
            "actor.model": {"path": "model", "gradient_checkpointing": True},
            "actor.optimizer": {
                "learning_rate": 0.01,
                "schedule": "cosine",
                "warmup_steps": 1,
                "weight_decay": 0.1,
                "decay_embeddings": False,
            },
            "actor.ema": {"decay": 0.9},
            "algorithm.neftune_alpha": 5,
            "run.best": {"patience": 3},
        },
        (
            "report RUN",
            _EVAL,
            "export RUN --to RUN-exported --dtype float32",
            "sft RUN.yaml --run.resume auto --run.steps 5",
            "calibrate RUN --out RUN-calibration.json",
        ),
    ),
    Run(
        "sft-local-lora",
        "sft",
        {
            "actor.adapter": {**_ADAPTER, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
            "actor.model.gradient_checkpointing": "selective",
        },
        (
            "export RUN --to RUN-merged --merge",
            "merge RUN/model --out RUN-plain --dtype float32",
            "sft RUN.yaml --run.resume auto --run.steps 4",
        ),
    ),
    Run(
        "sft-local-qlora",
        "sft",
        {
            "actor.adapter": {**_ADAPTER, "rslora": True},
            "actor.model": {"path": "other", "quantization": "nf4"},
            "actor.zero": _STAGE_3,
            "actor.optimizer.kind": "adamw_8bit",
        },
    ),
    Run(
        "sft-local-mixture",
        "sft",
        {
            "data.train": {
                "asked": {"path": "rows.jsonl", **COLUMNS["sft"], "weight": 2},
                "told": {"path": "rows.jsonl", "text": "text", "limit": 9},
            },
            "actor.model": {"path": "mixture", "dtype": "float32", "checkpoint_every": 2,
                            "gradient_checkpointing": True},
            "actor.zero": {"stage": 0},
            "actor.optimizer": {"learning_rate": 0.01, "schedule": "wsd", "decay_steps": 1},
            "algorithm.learned_tokens": "all",
        },
    ),
    Run(
        "distill-local",
        "distill",
        {"algorithm": {"divergence": {"name": "jsd"}, "temperature": 2.0, "nll_share": 0.2}},
        (_EVAL,),
    ),
    Run("rm-local", "rm", {"data.train.margin": "margin", "algorithm.centring": 0.01}, (_EVAL,)),
    Run("prm-local", "prm", {"data.step_separator": " "}, (_EVAL,)),
    Run(
        "dpo-local",
        "dpo",
        {"reference.model": _OTHER, "reference_logprobs.precompute": True,
         "algorithm.nll_weight": 0.2},
        (_EVAL, "dpo RUN.yaml --run.resume auto --run.steps 4"),
    ),
    Run(
        "dpo-local-unshared",
        "dpo",
        {"batch.share_prompts": False, "actor.model.dtype": "float32",
         "algorithm.loss": {"name": "ipo"}},
    ),
    Run("dpo-local-simpo", "dpo", {"algorithm.loss": {"name": "simpo"}}),
    Run(
        "kto-local-lora",
        "kto",
        {"actor.adapter": _ADAPTER,
         "algorithm.loss.options": {"beta": 0.5, "undesirable_weight": 1.5}},
        (
            _EVAL,
            "export RUN --to RUN-merged --merge",
            "eval RUN --model RUN-merged --out RUN-eval",
        ),
    ),
    Run(
        "ppo-local",
        "ppo",
        {
            "rewards": {"right": {"name": "exact_match"}, "own": {"name": "own:mean"},
                        "length": {"name": "length", "weight": 0.1}},
            "reward_model": {"role": {"model": {"path": "judge", "dtype": "float32"}}},
            "algorithm": {"mini_batches": 2, "epochs": 2,
                          "kl": {"adaptive": {"target": 0.5, "horizon": 50}},
                          "entropy_bonus": 0.01},
            "eval_sampling": {"max_new_tokens": 8, "temperature": 0},
        },
        (_EVAL, "ppo RUN.yaml --run.resume auto --run.steps 4"),
    ),
    Run(
        "ppo-local-kl-in-loss",
        "ppo",
        {"reference.model": _OTHER, "algorithm.kl": {"place": "loss", "estimator": "k3"},
         "algorithm.critic_warmup_steps": 1, "algorithm.value_clip": None},
        ("ppo RUN.yaml --run.resume auto --run.steps 4",),
    ),
    Run("ppo-local-broken-reward", "ppo", {"rewards": {"own": {"name": "own:broken"}}}),
    Run("dpo-local-wrong-loss", "dpo", {"algorithm.loss": {"name": "own:wrong"}}),
    Run(
        "sft-ray",
        "sft",
        {"cluster": _RAY, "actor.zero": {"stage": 1, "optimizer_offload": "cpu"}},
    ),
    Run(
        "distill-ray",
        "distill",
        {
            "cluster": _RAY,
            "actor.zero": _STAGE_3,
            "teacher.zero": {"stage": 3, "offload": "cpu"},
        },
    ),
    Run("rm-ray", "rm", {"cluster": _RAY, "actor.zero": {"stage": 2}}),
    Run("prm-ray", "prm", {"cluster": _RAY, "actor.zero": {"stage": 0}}),
    Run(
        "dpo-ray",
        "dpo",
        {"cluster": _RAY, "actor.zero": _OFFLOADED,
         "reference": {"model": _OTHER, "zero": {"stage": 3}},
         "actor.model.gradient_checkpointing": True},
        ("report RUN", "export RUN --to RUN-exported"),
    ),
    Run(
        "kto-ray",
        "kto",
        {"cluster": _RAY, "actor.adapter": _ADAPTER, "actor.zero": _STAGE_3,
         "actor.model.quantization": "nf4", "reference_logprobs.precompute": True},
    ),
    Run(
        "ppo-ray",
        "ppo",
        {"cluster": _RAY, "rollout": {**_VLLM, "engines": 2}, "actor.zero": _STAGE_3,
         "critic.zero": _STAGE_3, "batch.responses": 2},
        ("report RUN", "ppo RUN.yaml --run.resume auto --run.steps 4"),
    ),
    Run(
        "ppo-ray-critic-ranks",
        "ppo",
        {"cluster": {**_RAY, "critic_ranks": 1}, "rollout": _ENGINE, "actor.zero": {"stage": 1}},
        ("ppo RUN.yaml --run.resume auto --run.steps 4",),
    ),
    Run(
        "ppo-ray-lora",
        "ppo",
        {"cluster": {**_RAY, "ranks": 1}, "actor.adapter": _ADAPTER,
         "rollout": {**_VLLM, "sync": {"adapter": "separate"}, "placement": "shared"}},
    ),
)  # fmt: skip


def record_runs(
    home: Path,
    out: Path,
    paths: Mapping[str, str],
    chosen: Sequence[str] | None,
    begun_by: str,
) -> None:
    """Those in one process two at a time, then those on Ray one after the other. begun_by: the
    Python of their first command."""
    (home / "own.py").write_text(OWN)
    wanted = [run for run in RUNS if chosen is None or run.name in chosen]
    with ThreadPoolExecutor(2) as threads:
        local = [run for run in wanted if not run.on_ray]
        list(threads.map(lambda run: _record(run, home, out, paths, begun_by), local))
    for run in wanted:
        if run.on_ray:
            _record(run, home, out, paths, begun_by)


def _record(run: Run, home: Path, out: Path, paths: Mapping[str, str], begun_by: str) -> None:
    (home / f"{run.name}.yaml").write_text(text(run.job, _config(run)))
    said, codes = [], []
    for i, line in enumerate((f"{run.job} RUN.yaml", *run.then)):
        words = tuple(word.replace("RUN", run.name, 1) for word in line.split())
        python = begun_by if i == 0 else sys.executable
        done = alone(Call("", words, home, {"PYTHONPATH": str(home)}), python)
        masked = not run.exact or words[0] in ("report", "calibrate")
        shown, told = (normal(part, paths, masked=masked) for part in (done.out, done.err))
        said.append(f"$ plimsoll {' '.join(words)}\n{shown}--- exit code {done.code}\n{told}")
        codes.append(done.code)
    write(out / "runs" / run.name / "said.txt", "\n".join(said))
    for made in sorted(home.glob(f"{run.name}*")):
        kind = made.name.removeprefix(run.name).strip("-") or "run"
        if kind != ".yaml" and _is_own(made.name, run.name):
            for name, content in digest(made, exact=run.exact).items():
                write(out / "runs" / run.name / kind / name, normal(content, paths))
    print(f"  {run.name}: exit codes {codes}", flush=True)


def _is_own(name: str, run: str) -> bool:
    """Whether no other run has made it, whose name goes on after this one's."""
    return not any(name.startswith(o.name) and len(o.name) > len(run) for o in RUNS)


def _config(run: Run) -> dict[str, Any]:
    columns = COLUMNS[run.job]
    here: dict[str, Any] = {
        "run": {"directory": run.name, "steps": 3, "save_every": 2, "eval_every": 2, "seed": 3},
        "cluster": _LOCAL,
        "data.eval": {"path": "held_out.jsonl", **columns},
        "data.chat_template": "none",
        "data.max_tokens": 48,
        "batch": {"micro_batch_tokens": 160},
        "actor.optimizer.learning_rate": 0.01,
    }
    if run.job == "ppo":
        here["batch"] |= {"prompts": 6}
        here["rewards.own"] = {"name": "own:mean", "options": {"scale": 2.0}}
        here |= {"rollout": _ENGINE, "critic.optimizer.learning_rate": 0.01}
    else:
        here["batch"] |= {"pairs" if run.job in ("dpo", "rm") else "sequences": 6}
    if run.job == "distill":
        here["teacher.model"] = _OTHER
    return changed(changed(smallest(run.job, "model"), here), run.changes)
