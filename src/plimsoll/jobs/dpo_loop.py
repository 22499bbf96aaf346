"""Direct preference optimisation and its family: learning from pairs; Rafailov et al. 2023.

    plimsoll dpo CONFIG.yaml

Each step draws pairs, scores them with the frozen reference, and takes an optimizer step on the
loss of the config. The reference does not score if the loss needs none, or if all pairs were scored
before. Both responses of a pair are in the same pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.inputs import PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.cluster.protocol import Cluster
from plimsoll.data.dataset import load_pairs
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.roles import REFERENCE
from plimsoll.records import BatchCounts, Floats, Pair, samples_of
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.readings import Planned
from plimsoll.train.from_data import Work, learn_from_data, work_on_rows
from plimsoll.train.loading import load_roles
from plimsoll.train.measure import pair_output_metrics, score_in_parts
from plimsoll.train.reference import Reference, load_with_reference
from plimsoll.train.run_data import load_held_out, row_counts
from plimsoll.train.update import OptimizerStep, Packs, log_probs, pack_rows
from plimsoll.trainer.objectives import SEQUENCE_REFERENCE, PreferenceObjective

DpoWork = Work[DpoConfig, Pair]

ScoredPairs = tuple[Packs, Floats | None]
"""The held-out pairs in packs, and their sequences' log-probs under the reference, if there is one.
They are the same in every evaluation.
"""


def run(spec: RunSpec[DpoConfig], planned: Planned) -> None:
    """Train the policy. `run.resume` decides whether an earlier run goes on."""
    preference_loss(spec.config.algorithm.loss)  # a wrong name or option ends the run right here
    with work_on_rows(spec, planned, load_pairs) as work:
        reference = None
        if REFERENCE in spec.roles:
            logprobs = spec.config.reference_logprobs
            reference = load_with_reference(work, REFERENCE, work.batches_ahead, logprobs)
        else:
            load_roles(work)
        held_out = None if spec.run.eval_every is None else hold_out(work, reference)
        learn_from_data(work, partial(learn, work, reference), partial(evaluate, work, held_out))


def learn(work: DpoWork, reference: Reference | None, batch: Sequence[Pair]) -> OptimizerStep:
    """Score a batch of pairs with the reference; return the policy's optimizer step for it."""
    algorithm, packs = work.config.algorithm, pack_rows(work.spec, batch, work.cluster)
    columns = {} if reference is None else {SEQUENCE_REFERENCE: reference(batch, packs, "score")}
    return OptimizerStep(
        packs,
        BatchCounts.of(samples_of(batch)),
        PreferenceObjective(algorithm.loss, algorithm.nll_weight),
        columns,
        unit=2,
    )


def hold_out(work: DpoWork, reference: Reference | None) -> ScoredPairs:
    """Return the held-out pairs in packs, with the reference's log-probs (None: no reference)."""
    packs = pack_rows(work.spec, work.data.eval, work.cluster)
    return packs, None if reference is None else reference(work.data.eval, packs, "eval")


def evaluate(work: DpoWork, held_out: ScoredPairs | None) -> dict[str, float]:
    """Return the loss on the held-out pairs and its metrics, by name."""
    assert held_out is not None, "evaluated without run.eval_every"
    packs, reference = held_out
    logprobs = log_probs(work.spec.sender.name, packs, work.cluster)
    return pair_metrics(work.config, work.data.eval, logprobs, reference)


def pair_metrics(
    config: DpoConfig, pairs: Sequence[Pair], logprobs: Floats, reference: Floats | None
) -> dict[str, float]:
    """Return the loss on pairs and its metrics, with the accuracy's 95 % confidence interval.

    `logprobs` and `reference` are log-probs under actor and reference, one for each sequence in
    the order chosen, rejected, chosen, ...
    """
    lengths = np.array([s.loss_mask.sum() for s in samples_of(pairs)], dtype=np.float32)
    output = preference_objective(
        PreferenceLossInputs(_in_pairs(logprobs), _in_pairs(lengths), len(pairs)),
        None if reference is None else _in_pairs(reference),
        preference_loss(config.algorithm.loss),
        config.algorithm.nll_weight,
    )
    return pair_output_metrics(output, pairs)


def _in_pairs(values: Floats) -> PairValues:
    return in_pairs(torch.from_numpy(values))


def measure(spec: RunSpec[DpoConfig], directory: Path) -> dict[str, float]:
    """Return a model's loss on the held-out pairs with its metrics, and the counts of rows."""
    roles, loaded = tuple(spec.roles), load_held_out(spec, load_pairs)

    def score(cluster: Cluster, pairs: Sequence[Pair]) -> list[Floats]:
        packs = pack_rows(spec, pairs, cluster)
        return [log_probs(role, packs, cluster) for role in roles]

    parts = score_in_parts(spec, loaded.items, score, *roles)
    actor, *others = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    reference = others[0] if others else None
    return pair_metrics(spec.config, loaded.items, actor, reference) | row_counts(loaded)
