"""What the free text of a published row says of how attention is computed."""

from __future__ import annotations

import re

from peak_numbers import Text, version
from peak_words import Choices, by, choice, varied

_ATTENTION: Choices = (
    (r"^(no|none|false|eager)\b", True),
    (r"flash|fa-?[234]|sdpa|yes|true|varlen|xformers|fmha|flex|cudnn|mem\w*[-_]eff", False),
    (r"\bmath\b", False),
)
_BEFORE_AMPERE = r"\b(?:t4(?!\d)|[vp]100|p40|gtx|titan|(?:rtx ?)?20[678]0)"


def eager(text: Text) -> bool:
    """Whether attention writes its scores out."""
    return choice(text, "flash_attn", _ATTENTION)


def math(text: Text, grouped: bool) -> bool:
    """Whether PyTorch computes attention without a kernel: as a row says, or for want of one.

    grouped: several heads of queries read one of keys.
    """
    said = re.search(r"(?<!no )(?<!not )\bmath\b", text["flash_attn"])
    return bool(said) or _bfloat16(text) or (grouped and _ungrouped(text))


def _bfloat16(text: Text) -> bool:
    """Whether what attention reads is bfloat16, for which no kernel of PyTorch's runs before Ampere
    (sdp_utils.cpp: less_than_sm80_mem_efficient_dtypes)."""
    narrow = re.search(r"\bbf(?:loat)?16\b", text["dtype"])
    before = re.search(_BEFORE_AMPERE, text["gpu"])
    return bool(narrow and before and "sdpa" in text["flash_attn"])


def _ungrouped(text: Text) -> bool:
    """Whether no kernel takes several heads of queries to one of keys, as transformers has them
    computed since 4.48, of 2025, where there is no padding to mask: flash attention needs an Ampere
    card, and PyTorch's memory-efficient kernel as many of both (huggingface/transformers#48633).
    LitGPT and torchtune repeat the keys themselves, as transformers did."""
    padded = varied(text) and text["micro_batch"] != "1"
    named = re.search(r"kernel|eff|flash", text["flash_attn"])
    dated = re.search(r"\b202[0-4]\b", f"{text['source']} {text['notes']}")
    earlier = dated or (0, 0) < version(text, "transformers") < (4, 48)
    repeated = earlier or re.search(r"torchtune|lit-?gpt", by(text))
    before = re.search(_BEFORE_AMPERE, text["gpu"])
    return bool(before and "sdpa" in text["flash_attn"] and not (padded or named or repeated))
