"""What the jobs that learn from pairs share: their samples, packs, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.algorithm.inputs import LossOutput
from plimsoll.algorithm.interval import share_interval
from plimsoll.cluster.protocol import Ranks
from plimsoll.data.packing import pack_pairs
from plimsoll.records import Pair, Sample
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.update import Packs, as_metrics


def samples_of(pairs: Sequence[Pair]) -> list[Sample]:
    """Of each pair the chosen sample, then the rejected one."""
    return [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]


def pack_rows(spec: RunSpec[Any], pairs: Sequence[Pair], ranks: Ranks) -> Packs:
    """The packs of each rank, as the config's `batch` says."""
    work, n = spec.workload, ranks.ranks
    return pack_pairs(pairs, n, work.largest_pack(n), share_prompts=work.shares_prompts)


def as_pair_metrics(output: LossOutput, prompts: Sequence[int]) -> dict[str, float]:
    """The loss and its metrics, with the accuracy's 95 % confidence interval over prompts.
    prompts: of each pair."""
    metrics = as_metrics(output)
    if "accuracy" in metrics and output.right_P is not None:  # a loss of one's own may lack either
        low, high = share_interval(output.right_P.numpy(), prompts)
        metrics |= {"accuracy_low": low, "accuracy_high": high}
    return metrics


def prompts_of(pairs: Sequence[Pair]) -> list[int]:
    """Of each pair the number of its prompt."""
    return [pair.prompt for pair in pairs]
