"""What the free text of a published row says, matched by whole words."""

from __future__ import annotations

import re
from typing import Literal

from plimsoll.errors import ConfigError
from plimsoll.memory.machine.hardware import find_card
from plimsoll.memory.shapes.known_models import known_models, read_shape
from plimsoll.memory.shapes.shape import ModelShape

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Precision = Literal["mixed", "pure", "fp32", "fp32 weights"]
Metric = Literal["allocated", "reserved", "device", "unstated"]
Quantization = Literal["none", "nf4", "nf4 twice", "gptq", "gptq 8", "int8"]
Text = dict[str, str]
"""A row by column, in lower case."""


class NotKnown(Exception):
    """A value that nothing here knows."""

    def __init__(self, column: str, value: str) -> None:
        super().__init__(column, value)
        self.column, self.value = column, value


_CHECKPOINTING = (
    (r"^(no|none|false|off|disabled|without)\b", False),
    (r"^(yes|full|true|on|enabled|recompute|offload|unsloth|(non-)?reentrant)\b", True),
    (r"^(enable_activation|gradient|activation)_checkpointing\b", True),
)
_ATTENTION = (
    (r"^(no|none|false|eager)\b", True),
    (r"flash|fa-?[234]|sdpa|yes|true|varlen|xformers|fmha", False),
)
_TASKS = ((r"sft|finetun|fine-tun|pretrain|\blm\b|cpt", True), (r"trainer only|dpo", True))


def _choice(text: Text, column: str, known: tuple[tuple[str, bool], ...]) -> bool:
    for pattern, value in known:
        if re.search(pattern, text[column]):
            return value
    raise NotKnown(column, text[column])


def checkpointed(text: Text) -> bool:
    """Whole layers are; which of a layer's results a selective kind keeps differs by project."""
    return _choice(text, "grad_ckpt", _CHECKPOINTING)


def eager(text: Text) -> bool:
    """Whether attention writes its scores out."""
    return _choice(text, "flash_attn", _ATTENTION)


def task(text: Text) -> bool:
    """Only jobs with one trained model are modelled (and DPO's frozen one)."""
    return _choice(text, "task", _TASKS)


def shape(name: str) -> ModelShape:
    """A known model, also where its organisation, `-hf` or `Meta-` are left out."""
    found = [known for known in known_models() if _bare(known) == _bare(name)]
    if not found:
        raise NotKnown("model", name)
    return read_shape(found[0])


def _bare(name: str) -> str:
    last = name.lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-hf")
    return re.sub(r"[ ._-]+|(?<=[a-z])(?=\d)", "-", last)


def capacity(gpu: str) -> int | None:
    """Bytes of a card; None where it is not known."""
    try:
        return find_card(gpu).usable_bytes
    except ConfigError:
        return None


def integer(raw: Text, column: str) -> int:
    """A count, above 0; `4k` is 4,096."""
    found = re.fullmatch(r"(\d+)(k?)", raw[column].replace(",", "").lower())
    if not found or int(found[1]) == 0:
        raise NotKnown(column, raw[column])
    return int(found[1]) * (1024 if found[2] else 1)


def strategy(text: Text) -> Strategy:
    """How states are divided."""
    value = text["strategy"]
    if re.search(r"\bfsdp2?\b", value):  # before ZeRO, which it is often likened to
        return "fsdp"
    if match := re.search(r"(?:zero[- _]?(?:stage)?|stage|ds_z)[- _]?([123])(?!\d)", value):
        stages: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}
        return stages[match[1]]
    if re.search(r"\bddp\b|data parallel", value):
        return "ddp"
    if re.search(r"single|^none$|^1 ?gpu", value):
        return "single"
    raise NotKnown("strategy", value)


def offloads(text: Text, what: str) -> bool:
    """Whether anything of that name is."""
    value = text["offload"]
    known = r"optim\w*|param\w*|weights?|states?|activations?|cpu|to|and|none|no|false"
    if not re.fullmatch(rf"(({known})\W*)*", re.sub(r"\(.*?\)", "", value)):  # by what means
        raise NotKnown("offload", value)
    return bool(re.search(what, value))


_TARGETS = {  # as PEFT, LitGPT and torchtune name them
    **dict.fromkeys(("q", "query"), ("q_proj",)),
    **dict.fromkeys(("k", "key"), ("k_proj",)),
    **dict.fromkeys(("v", "value"), ("v_proj",)),
    **dict.fromkeys(("o", "output_proj"), ("o_proj",)),
    "projection": ("o_proj", "dense"),
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
        "torchtune" in text["source"] and re.fullmatch(r"bf16", value)
    ):
        return "pure"
    if re.search(r"(fp|float)32 (?:params|weights|master)", value):
        return "fp32 weights"
    if re.search(r"\bb?f(?:loat|p)?16\b|amp|mixed|4-?bit|nf4|int[48]", value):
        return "fp32 weights" if divided == "fsdp" and not text["peft"].count("lora") else "mixed"
    if re.fullmatch(r"(fp|float)32|tf32", value):
        return "fp32"
    raise NotKnown("dtype", value)


def prepared(text: Text, divided: Strategy) -> bool:
    """Whether PEFT's preparation for training in 4 or 8 bits was done: it is where nothing else is
    said. What FSDP divides has one dtype, and so stays as it was."""
    if quantization(text) == "none" or divided == "fsdp":
        return False
    named = r"prepares the model|prepare_model_for_\w+|peft's prep"
    if said := re.search(rf"(\bno |\bnot |without )?(?:{named})", text["notes"]):
        return not said[1]
    return precision(text, divided) != "pure"


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
    if re.search(r"galore|apollo|badam|adam-?mini|lomo|4-?bit", value):
        raise NotKnown("optimizer", value)
    if "paged" in value and metric(text["notes"]) in ("allocated", "reserved"):
        return 0.0
    kinds = (("adam", 8.0), ("lion", 4.0), ("adafactor", 0.02), ("sgd", 0.0))
    for name, each in kinds:
        if name in value:
            return each / 4 if re.search(r"8-?bit", value) else each
    raise NotKnown("optimizer", value)


def accumulates(text: Text) -> bool:
    """Whether gradients are, over several micro-batches: they are where nothing is said."""
    one = r"no grad\w* accumulation|grad\w*[ _]accum\w*(?:[ _]steps)?\W*1\b"
    return not re.search(one, text["notes"])


_FUSED_HEAD = r"fused (?:linear )?(?:cross|ce\b)|cut cross|fused (?:chunked )?(?:lm )?head"


def chunk(text: Text) -> int | None:
    """Rows of logits at once; None: all. Liger's kernels fuse the head, if nothing else is said."""
    notes = text["notes"]
    if match := re.search(r"chunked (?:lm )?head \((\d+)\)|chunk(?:s of| size)? ?=? ?(\d+)", notes):
        return int(match[1] or match[2])
    if re.search(rf"logits materiali[sz]ed|(?:no|without) (?:liger|{_FUSED_HEAD})", notes):
        return None
    return 1024 if re.search(rf"liger|{_FUSED_HEAD}", notes) else None


def fused_layers(text: Text) -> bool:
    """Whether norms, rotary embeddings and MLPs are Liger's."""
    return bool(re.search(r"(?<!no )(?<!without )liger kernels?\b", text["notes"]))


def loss_in_place(text: Text) -> bool:
    """Whether one kernel makes the gradient of whole logits where these are."""
    return bool(re.search(r"fastkernels|liger cross.?entropy", text["notes"]))


def peak(text: Text) -> float | None:
    """Bytes: GiB and MiB only where it or the notes say so. None: it ran out."""
    value = text["reported_peak_gb_per_gpu"]
    if re.search(r"oom|out of memory", value):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(gib|gb|g|mib)?", value)
    if not found:
        raise NotKnown("reported_peak_gb_per_gpu", value)
    said = found[2] or next(iter(re.findall(r"\b(gib|mib)\b", text["notes"])), "gb")
    return float(found[1]) * {"gib": 2**30, "mib": 2**20}.get(said, 1e9)


_METRICS: tuple[tuple[Metric, str], ...] = (
    ("reserved", "reserved"),
    ("allocated", "allocated|memory active|log_peak_memory_stats"),
    ("device", "nvidia-smi|nvml|device[- ]used"),
)


def metric(notes: str) -> Metric:
    """What was read: the first that is named. Active memory is what is allocated, and what is freed
    as soon as another stream is done with it."""
    found = [
        (match.start(), name) for name, words in _METRICS if (match := re.search(words, notes))
    ]
    return min(found)[1] if found else "unstated"
