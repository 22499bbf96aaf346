"""The names that a run itself gives in metrics.jsonl: a loss may have none of them for a metric of
its own, as one number would overwrite the other.
"""

from __future__ import annotations

import re

_OF_ALL_JOBS = (
    "step|loss|grad_norm|skipped_steps|learning_rate|tokens|tokens_per_second|"
    "epoch(/.*)?|(eval|seconds|memory_bytes)/.*"
)
_INTERVAL = "accuracy_low|accuracy_high"
_OF_A_JOB = {
    "policy_loss": "policy_loss|entropy|kl|kl_loss|kl_coefficient|reward(/.*)?|response_tokens|"
    "finished|logprob_gap|value_.*|(actor|critic|sync)/.*",
    "preference_loss": f"preference_loss|nll|{_INTERVAL}",
    "reward_loss": f"reward_loss|off_centre|calibration_error|{_INTERVAL}",
    "unpaired_loss": f"accuracy|{_INTERVAL}",
}
"""By the package of algorithm/ that holds the job's losses; those of its evaluation, which begin
with `eval/` there, are among them."""


def of_the_run(package: str, name: str) -> bool:
    """Whether a run whose loss is of this package of algorithm/ has a metric of this name, whatever
    the loss."""
    return re.fullmatch(f"{_OF_ALL_JOBS}|{_OF_A_JOB[package]}", name) is not None
