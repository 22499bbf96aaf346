"""What the free text of a published row says of the head and its loss."""

from __future__ import annotations

import re

from peak_numbers import Text, trl

_FUSED_HEAD = (
    r"(?:fused[- ](?:linear[- ])?(?:cross|ce\b)|cut[- ]cross|fused (?:chunked )?(?:lm )?head)"
)
NO_LIGER = r"(?:no|without) liger|liger\w*(?: kernels?)?\W{1,2}(?:no|off|false)\b"
_CHUNK = (
    r"chunked (?:lm )?head \((\d+)\)|(?:loss|head|logits?)[^;]*\bchunk(?:s of| size)? ?=? ?(\d+)"
    r"|\bchunk(?:s of| size)? ?=? ?(\d+)[^;]*(?:loss|head|logits?)"
)


def chunk(text: Text) -> int | None:
    """Rows of logits at once; None: all. Liger's kernels fuse the head, if nothing else is said,
    and so do TRL's trainer for SFT since 1.7 and prime-rl's for RL."""
    notes = text["notes"]
    if match := re.search(_CHUNK, notes):
        return int(match[1] or match[2] or match[3])
    if re.search(rf"logits materiali[sz]ed|{NO_LIGER}|(?:no|without) {_FUSED_HEAD}", notes):
        return None
    if _chunked_nll(text):
        return 256  # TRL's _CHUNKED_LM_HEAD_CHUNK_SIZE
    if re.search(rf"liger|{_FUSED_HEAD}", notes):
        return 1024
    if "prime-rl" in text["source"] and re.search(r"grpo|\brl\b", text["task"]):
        return 2048  # trainer/rl/config.py, auto_setup_fused_lm_head_chunk_size
    return None


def _chunked_nll(text: Text) -> bool:
    default = trl(text) >= (1, 7) and "sft" in text["task"]
    other = re.search(r"liger|loss_type\W{0,3}(?:nll|dft)\b", text["notes"])
    return "chunked_nll" in text["notes"] or (default and not other)


def head_copies(text: Text) -> bool:
    """Whether a fused head is multiplied in fp32 under torch.autocast, as by TRL before 1.13."""
    return (0, 0) < trl(text) < (1, 13) and _chunked_nll(text)


def chunked_loss(text: Text) -> bool:
    """Whether logits are all there, and their loss is of some at a time."""
    return bool(re.search(r"chunked[_ ](?:ce\b|cross.?entropy)|chunkedoutput", text["notes"]))


def loss_in_place(text: Text) -> bool:
    """Whether one kernel makes the gradient of whole logits where these are."""
    return bool(re.search(r"fastkernels|liger cross.?entropy", text["notes"]))


def holds_output(text: Text) -> bool | None:
    """Whether the model's output lives until the backward is done; None where nothing is said."""
    return True if "keeps the model's output" in text["notes"] else None
