"""The common families' chat templates, each with a small tokenizer that has its special tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plimsoll.data.pieces import ChatTurn, Messages
from plimsoll.data.template import Template, make_template

TEMPLATES = Path(__file__).parent / "templates"
EMPTY = "<think>\n\n</think>\n\n"
_CORPUS = (
    "How much is two and two? It is four. The answer of the tool is a number.",
    "function name arguments user assistant system tool_call tool_response think",
)


@dataclass(frozen=True, repr=False)
class Family:
    """A family of models: what they write, and what their template takes."""

    name: str
    ends: tuple[str, ...]
    """The tokens at which a model stops. The template ends a turn with the first, unless the next
    turn's first token does that.
    """
    specials: tuple[str, ...]
    bos: str | None = None
    opens: str = ""
    """What a model writes between the prompt and its text."""
    closes: str = ""
    """How the template ends a turn."""
    thinks: str | None = None
    """How a model writes reasoning before its text, with `{}` for the reasoning; None if it does
    not.
    """
    system: bool = True
    """Whether the template takes system messages."""
    calls: bool = False
    """Whether the template takes calls with their results."""
    tools: bool = False
    """Whether the template takes the tools that may be called."""
    argument_text: bool = False
    """Whether a call's arguments are text, and not an object."""
    pieces: bool = False
    """Whether a space is a `▁` in the tokens, as in SentencePiece."""

    @functools.cached_property
    def template(self) -> Template:
        """Return the template that `make_template` makes of the family's file."""
        jinja = (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")
        return make_template(_tokenizer(self), jinja, None)


FAMILIES = (
    Family(
        "qwen2.5",
        ("<|im_end|>", "<|endoftext|>"),
        ("<|im_start|>",),
        closes="<|im_end|>\n",
        calls=True,
        tools=True,
    ),
    Family(
        "qwen3",
        ("<|im_end|>", "<|endoftext|>"),
        ("<|im_start|>",),
        closes="<|im_end|>\n",
        thinks="<think>\n{}\n</think>\n\n",
        calls=True,
        tools=True,
    ),
    Family(
        "llama3.1",
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        ("<|start_header_id|>", "<|end_header_id|>"),
        bos="<|begin_of_text|>",
        closes="<|eot_id|>",
        calls=True,
        tools=True,
    ),
    Family(
        "mistral-v0.3",
        ("</s>",),
        (
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        opens=" ",
        closes="</s>",
        pieces=True,
        calls=True,
        tools=True,
    ),
    Family(
        "gemma2",
        ("<end_of_turn>", "<eos>"),
        ("<start_of_turn>",),
        bos="<bos>",
        closes="<end_of_turn>\n",
        pieces=True,
        system=False,
    ),
    Family(
        "deepseek-v2",
        ("<｜end▁of▁sentence｜>",),
        (),
        bos="<｜begin▁of▁sentence｜>",
        opens=" ",
        closes="<｜end▁of▁sentence｜>",
    ),
    Family(
        "deepseek-r1",
        ("<｜end▁of▁sentence｜>",),
        (
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        bos="<｜begin▁of▁sentence｜>",
        closes="<｜end▁of▁sentence｜>",
        thinks="{}\n</think>\n\n",
        calls=True,
        argument_text=True,
    ),
    Family(
        "glm-4",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        opens="\n",
    ),
    Family(
        "glm-4.5",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        opens="\n",
        thinks="<think>{}</think>\n",
        calls=True,
        tools=True,
    ),
)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    backend = spaced_tokenizer("first") if family.pieces else _byte_tokenizer()
    specials = [*family.ends, *family.specials, *([family.bos] if family.bos else [])]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        name_or_path=f"tests/{family.name}",
        eos_token=family.ends[-1],
        bos_token=family.bos,
    )


def _byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, some of which are merged to parts of words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def spaced_tokenizer(prepend: str) -> Tokenizer:
    """Return a tokenizer like SentencePiece's: a space is a `▁`, and so is the beginning of a text.

    Characters that are no tokens become bytes. `prepend` is `first`, or `always` for every text
    between special tokens.
    """
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁i", "is", "▁is"]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + letters
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("▁", "t"), ("▁", "i"), ("i", "s"), ("▁i", "s")],
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def said(family: Family, prompt: str, content: str, thought: str | None) -> str:
    """Return a reply's content with reasoning, as the family writes it after a prompt."""
    opened = prompt.endswith("<think>\n")
    if family.thinks is None or (thought is None and not opened and family.name != "glm-4.5"):
        return content
    if "<think>" not in family.thinks and not opened:
        return content
    return family.thinks.format(thought or "") + content


def spoken(family: Family, template: Template, before: Messages, reply: ChatTurn) -> str:
    """Return what the model writes as a reply. Calls are as the template writes them."""
    if "tool_calls" not in reply:
        return family.opens + str(reply["content"])
    [prompt], [whole] = template.render_prompt(before), template.render_whole([*before, reply])
    if family.name == "mistral-v0.3":
        calls = "".join(whole.text.rpartition("[TOOL_CALLS]")[1:])
    else:
        calls = whole.text.removeprefix(prompt.text.removesuffix("<think>\n"))
    text = calls.removesuffix(family.closes)
    # Qwen3's writes empty reasoning into a last turn that has none.
    return text if "<think>" in str(reply["content"]) else text.removeprefix(EMPTY)


def sampled(family: Family, text: str) -> list[int]:
    """Return tokens that read as the text, but differ from those that the tokenizer would choose.

    Each character is tokenized by itself, behind a special token, so that no space comes before it.
    """
    tokenizer = family.template.tokenizer
    letters = (f"{tokenizer.eos_token}{letter}" for letter in text)
    ids = (tokenizer(letter, add_special_tokens=False)["input_ids"][1:] for letter in letters)
    return list(itertools.chain.from_iterable(ids))


def end_tokens(family: Family) -> list[int]:
    """Return the tokens at which sampling stops."""
    return [token_of(family, end) for end in family.ends]


def token_of(family: Family, special: str) -> int:
    """Return the number of a token."""
    return int(family.template.tokenizer.convert_tokens_to_ids(special))


def read(family: Family, ids: Sequence[int]) -> str:
    """Return the whole text, with special tokens."""
    return str(family.template.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
