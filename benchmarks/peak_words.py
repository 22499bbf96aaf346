"""What the free text of a published row says, matched by whole words."""

from __future__ import annotations

import re
from typing import Literal

from peak_losses import NO_LIGER
from peak_numbers import NotKnown, Text, metric, trl
from peak_policies import completion

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Precision = Literal["mixed", "pure", "fp32", "fp32 weights"]
Quantization = Literal["none", "nf4", "nf4 twice", "gptq", "gptq 8", "int8"]


Choices = tuple[tuple[str, bool | None], ...]
"""Patterns in the order they count. None: known, but not modelled."""
_ITS_NAME = r"(?:enable_)?(?:gradient|activation)[ _-]checkpointing"
_CHECKPOINTING: Choices = (
    (r"every (?!(layer|block)\b)|selective|partial|some", None),
    (rf"^({_ITS_NAME}\W+)?(no?|none|false|off|disabled|without|0)\b", False),
    (r"^(y(es)?|(ac )?full|true|on|1|enabled|recompute|offload\w*|unsloth)\b", True),
    (r"^((non-)?reentrant|use_reentrant|checkpointed|(every|each|per)[- ](layer|block))\b", True),
    (rf"^{_ITS_NAME}\b", True),
)
_PAIRS = r"dpo|orpo|simpo|\bcpo\b"
_TASKS: Choices = (
    (r"sft|fine-?tun|instruct|pre-?train|\bc?lm\b|language model|cpt", True),
    (rf"trainer only|{_PAIRS}|\bkto\b", True),
)


def by(text: Text) -> str:
    """Where a row names who ran it, and with what."""
    return f"{text['source']} {text['task']}"


def choice(text: Text, column: str, known: Choices) -> bool:
    """What the first pattern says that the column has; NotKnown where none has it."""
    found = [value for pattern, value in known if re.search(pattern, text[column])]
    if not found or found[0] is None:
        raise NotKnown(column, text[column])
    return found[0]


def checkpointed(text: Text) -> bool:
    """Whole layers are; which of a layer's results a selective kind keeps differs by project."""
    return selective(text) or choice(text, "grad_ckpt", _CHECKPOINTING)


def selective(text: Text) -> bool:
    """Whether attention and every other product of a checkpointed layer are kept, as torchtitan's
    `_apply_op_sac` does."""
    return "torchtitan" in by(text) and bool(re.match(r"selective \(?op", text["grad_ckpt"]))


def task(text: Text) -> bool:
    """Only jobs with one trained model are modelled (and DPO's frozen one), and nobody's model code
    that computes all of its backward itself."""
    for column in ("task", "strategy", "notes"):
        if re.search(r"(?<!no )(?<!without )\bunsloth\b", text[column]):
            raise NotKnown(column, "unsloth")
    return completion(text) is not None or choice(text, "task", _TASKS)


def pairs(text: Text) -> bool:
    """Whether two responses are computed at once."""
    return bool(re.search(_PAIRS, text["task"]))


def reference(text: Text) -> bool:
    """Whether a frozen model is computed beside the trained one: DPO's and KTO's, if nothing else
    is said."""
    named = re.search(rf"{_PAIRS}|\bkto\b", text["task"])
    said = f"{text['task']} {text['notes']}"
    none = r"\b(?:no|without)(?: an?| the)? ref|reference[- ]free|precompute_ref\w*\W{0,3}true"
    return named is not None and named[0] in ("dpo", "kto") and not re.search(none, said)


_LAYERS_DIVIDED = (
    r"\b[tpces]p[ =_-]?(?!0*1\b)\d|hsdp|hybrid"
    r"|(tensor|pipeline|context|expert|sequence)[ -]parallel(?!\w* ?=? ?1\b)"
)


def strategy(text: Text) -> Strategy:
    """How states are divided, over all ranks; what divides layers besides is not modelled."""
    value = text["strategy"]
    if re.search(_LAYERS_DIVIDED, value) or ("offload" in value and "none" in text["offload"]):
        raise NotKnown("strategy", value)
    # before ZeRO, which it is often likened to
    named = r"\bfsdp[12]?(?:strategy)?\b|\bfull[_ ]shard|\bfully_shard|\bshard_grad_op\b"
    if re.search(named, value):
        return "fsdp"
    named = r"(?:zero[- _]?(?:stage)?|stage|\b(?:ds_)?z)"
    if match := re.search(rf"{named} ?[-_=:]? ?([123])(?!\d)", value):
        stages: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}
        return stages[match[1]]
    if re.search(r"\bddp(?:strategy)?\b|data[- ]?parallel", value):
        return "ddp"
    if re.search(r"single|^none\b|^1 ?gpu", value):
        return "single"
    raise NotKnown("strategy", value)


def kept_gathered(text: Text) -> bool:
    """Whether FSDP divides gradients and states alone, and keeps from forward to backward what it
    gathered of weights."""
    kept = r"reshard_after_forward\W{0,3}(?:false|off|no)\b"
    named = rf"shard_grad_op|zero[-_ ]?(?:stage)?[-_ ]?2(?!\d)|{kept}"
    return bool(re.search(named, text["strategy"]) or re.search(kept, text["notes"]))


def one_unit(text: Text) -> bool:
    """Whether FSDP is given no policy to wrap layers by, and so gathers all weights at once."""
    bare = r"fsdpstrategy\((?!.*(?:wrap|polic))|\b(?:no|without)(?: an?)?[ _](?:auto[ _]?)?wrap"
    return bool(re.search(bare, text["strategy"]))


def offloads(text: Text, what: str) -> bool:
    """Whether anything of that name is."""
    value = text["offload"]
    known = r"optim\w*|param\w*|weights?|states?|activations?|cpu|to|and|none|no|false"
    if not re.fullmatch(rf"(({known})\W*)*", re.sub(r"\(.*?\)", "", value)):  # by what means
        raise NotKnown("offload", value)
    if "cpu" in value and not re.search("optim|param|weight|state|activation", value):
        raise NotKnown("offload", value)  # of what?
    return bool(re.search(what, value))


_TARGETS = {  # as PEFT, LitGPT and torchtune name them
    **dict.fromkeys(("q", "query"), ("q_proj",)),
    **dict.fromkeys(("k", "key"), ("k_proj",)),
    **dict.fromkeys(("v", "value"), ("v_proj",)),
    **dict.fromkeys(("o", "output_proj"), ("o_proj",)),
    "projection": ("o_proj", "dense"),
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"),
}


def targets(text: Text) -> tuple[str, ...]:
    """Last parts of the names of adapted linears, or all-linear."""
    words = re.findall(r"\w+", text["peft"])
    named = [_TARGETS.get(word, (word,)) for word in words if _is_target(word)]
    return tuple(name for group in named for name in group) or ("all-linear",)


def _is_target(word: str) -> bool:
    return word in _TARGETS or bool(re.fullmatch(r"\w+_proj|c_attn", word))


def quantization(text: Text) -> Quantization:
    """Of the linears' weights."""
    value = f"{text['peft']} {text['dtype']}"
    if "gptq" in value:
        return "gptq 8" if re.search(r"int8|8-?bit", value) else "gptq"
    if re.search(r"nf4-dq|double quant", value):
        return "nf4 twice"
    if re.search(r"nf4|4-?bit|int4|qlora", value):
        return "nf4"
    return "int8" if re.search(r"\bint8\b|\b8-?bit weights|llm\.int8", value) else "none"


def precision(text: Text, divided: Strategy) -> Precision:
    """Of weights and states."""
    value = text["dtype"]
    if "float8" in value or "fp8" in value:
        raise NotKnown("dtype", value)
    if re.search(r"b?f(?:p|loat)?16 (?:weights|params).*fp32 (?:master|optim)", value):
        return "mixed"
    if re.search(r"pure|-true|no autocast|\bb?f(?:loat|p)?16 (?:weights|params)", value) or (
        re.search(r"torchtune|nemo[/ ]automodel", by(text)) and re.fullmatch(r"bf16", value)
    ):
        return "pure"
    if re.search(r"(fp|float)32 (?:params|weights|master)", value):
        return "fp32 weights"
    if re.search(r"\bb?f(?:loat|p)?16\b|amp|mixed|4-?bit|nf4|int[48]", value):
        return "fp32 weights" if divided == "fsdp" and not text["peft"].count("lora") else "mixed"
    if re.fullmatch(r"(fp|float)32|tf32", value):
        return "fp32"
    raise NotKnown("dtype", value)


def autocast(text: Text, divided: Strategy) -> bool:
    """Whether torch.autocast casts fp32 weights where they are used. FSDP's own mixed precision and
    DeepSpeed have 16-bit ones; so has what is frozen beside an adapter, if nothing else is said."""
    wide = precision(text, divided) in ("mixed", "fp32 weights")
    if divided == "fsdp":
        return wide and bool(re.search(r"torch\.(?:amp|autocast)|amp_native", text["dtype"]))
    beside = "lora" in text["peft"] and precision(text, divided) != "fp32 weights"
    return wide and divided in ("single", "ddp") and not beside


def prepared(text: Text, divided: Strategy) -> bool | None:
    """Whether PEFT's preparation for training in 4 or 8 bits was done; None where nothing is said.
    What FSDP divides has one dtype, and TRL leaves it out there and under ZeRO-3."""
    if quantization(text) == "none" or divided in ("fsdp", "zero3"):
        return False
    named = r"prepares the model|prepare_model_for_\w+|peft's prep"
    if said := re.search(rf"(\bno |\bnot |without )?(?:{named})", text["notes"]):
        return not said[1]
    return False if precision(text, divided) == "pure" or trl(text) >= (0, 27) else None


def bucket(text: Text) -> int | None:
    """Elements of DeepSpeed's buckets of gradients; None where nothing is said."""
    said = f"{text['strategy']} {text['notes']}"
    found = re.search(r"reduce_bucket_size\W{0,3}(\d+(?:\.\d+)?(?:e\d+)?)", said)
    return int(float(found[1])) if found else None


def uncast(text: Text) -> bool:
    """Whether fp32 weights compute in fp32, and no autocast narrows what they make."""
    return bool(re.search(r"\b(?:no|without) (?:autocast|amp)\b", text["dtype"]))


def wide_adapters(text: Text, divided: Strategy) -> bool:
    """Whether an adapter's weights are fp32: PEFT's are, but not a project's own beside pure 16
    bits."""
    width, named = r"(fp32|float32|bf16|bfloat16|fp16|float16)", r"(?:adapters?|lora)(?: weights)?"
    if said := re.search(rf"{width} {named}|{named}(?: in)? {width}", text["dtype"]):
        return "32" in said[0]
    return precision(text, divided) != "pure"


def dropout(text: Text) -> bool | None:
    """Of adapters; None where nothing is said."""
    found = re.search(r"dropout\W{0,3}(\d*\.?\d+)|no (?:lora[ _])?dropout", _asides(text))
    return float(found[1] or 0) > 0 if found else None


def reentrant(text: Text) -> bool | None:
    """Of checkpoints; None where nothing is said."""
    found = re.search(r"(non-?|not )?reentrant(\W{0,3}false)?", _asides(text))
    return not (found[1] or found[2]) if found else None


def _asides(text: Text) -> str:
    return " ".join((text["peft"], text["grad_ckpt"], text["notes"]))


def moments(text: Text) -> float:
    """Bytes per parameter of states in fp32, or in 8 bits. Paged states are managed memory, which
    torch does not count."""
    value = text["optimizer"]
    if re.search(r"galore|apollo|badam|adam-?mini|lomo|muon|shampoo|4-?bit", value):
        raise NotKnown("optimizer", value)
    if "paged" in value and metric(text["notes"]) in ("allocated", "reserved"):
        return 0.0
    if re.search(r"\bno (?:optimizer )?step", value):  # a backward alone is measured
        return 0.0
    momentum = 4.0 if "momentum" in value else 0.0
    kinds = (("adam", 8.0), ("lion", 4.0), ("adafactor", 0.02), ("sgd", momentum))
    for name, each in kinds:
        if name in value:
            return each / 4 if re.search(r"8-?bit", value) else each
    raise NotKnown("optimizer", value)


def accumulates(text: Text) -> bool:
    """Whether gradients are, over several micro-batches: they are where nothing is said."""
    one = r"no grad\w* accumulation|grad\w*[ _]accum\w*(?:[ _]steps)?\W*1\b"
    return not re.search(one, text["notes"])


def varied(text: Text) -> bool:
    """Whether lengths differ from step to step."""
    return bool(re.search(r"samples of \d+ to|padded to the longest|lengths vary", text["notes"]))


def fused_layers(text: Text) -> bool | None:
    """Whether norms, rotary embeddings and MLPs are Liger's; None where nothing is said."""
    if re.search(NO_LIGER, text["notes"]):
        return False
    return True if re.search(r"liger[ _]kernels?\b", text["notes"]) else None
