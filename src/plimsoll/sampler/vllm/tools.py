"""Tool calls by vLLM's own parsers: the formats of Llama, Mistral, Qwen's XML and some forty more.

Import this module only if such a format is chosen: importing vLLM takes seconds.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParser, ToolParserManager

from plimsoll.config.base import AUTO
from plimsoll.config.files import nearest
from plimsoll.errors import ConfigError
from plimsoll.records import ExtractCalls, ExtractedCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGINS = {
    "llama3_json": r"\A\s*(<\|python_tag\|>|\{)",
    "llama4_json": r"\A\s*(<\|python_tag\|>|\{)",
    "pythonic": r"\A\s*\[\s*\w+\(",
    "llama4_pythonic": r"\A\s*(<\|python_start\|>|\[\s*\w+\()",
    "mistral": r"\[TOOL_CALLS\]",
    "qwen3_coder": r"<tool_call>|<function=",
    "qwen3_xml": r"<tool_call>|<function=",
}
_BEGIN = r"(?i)<[|｜]?tool[_▁]?call|\[TOOL_CALLS|<function"
"""How a call begins in other formats. If a parser cannot read a call, it returns the call as text,
and only this beginning shows it."""
_IDS = {"mistral": re.compile(r'"id"\s*:\s*"(\w{9})"')}
"""The ids that models write with calls, and that the calls' results must have; the parsers replace
them by others. Mistral's models write ids where calls are a list of objects."""


def vllm_extract(name: str, tokenizer: PreTrainedTokenizerBase) -> ExtractCalls:
    """Return a function that extracts tool calls from a text with vLLM's parser of a format.

    The text must have the tokenizer's special tokens. A call's id is the id that the model wrote
    with the call, or "".

    Args:
        name: a name of vLLM's `--tool-call-parser`.
        tokenizer: the tokenizer of the policy.

    Raises:
        ConfigError: vLLM does not know the name, or the tokenizer lacks tokens of the format.
    """
    known = ToolParserManager.list_registered()
    if name not in known:
        raise ConfigError(
            f"vLLM has no tool parser {name!r}.{nearest(name, known)} It has: {', '.join(known)}. "
            f"Which of them a model needs, its model card says (`--tool-call-parser`)."
        )
    parser: type[ToolParser] = ToolParserManager.get_tool_parser(name)
    for room in ("vllm.tool_parsers", "vllm.parser"):
        # Parsers log a traceback for each call that they cannot read; the policy gets a message.
        logging.getLogger(room).setLevel(logging.CRITICAL)
    begin, lock = re.compile(_BEGINS.get(name, _BEGIN)), Lock()
    parsers: dict[str, tuple[ToolParser, ChatCompletionRequest]] = {}

    def extract(text: str, tools: Sequence[Mapping[str, Any]]) -> ExtractedCalls:
        try:
            with lock:  # a parser has a state
                reader, request = _parser_for(parsers, parser, name, tokenizer, tools)
                result = reader.extract_tool_calls(text, request)
            calls = [(c.function.name, c.function.arguments, "") for c in result.tool_calls]
        except Exception as error:  # noqa: BLE001  whatever a policy writes may end a parser
            return text, (), (_unreadable(name, text, f" ({type(error).__name__}: {error})"),)
        if not calls and begin.search(text):
            return text, (), (_unreadable(name, text),)
        written_ids = _IDS[name].findall(text) if name in _IDS else []
        if len(written_ids) == len(calls):
            pairs = zip(calls, written_ids, strict=True)
            calls = [(function, arguments, call_id) for (function, arguments, _), call_id in pairs]
        return result.content or "", calls, ()

    no_tool = {"function": {"name": "none", "parameters": {}}}
    _parser_for(parsers, parser, name, tokenizer, (no_tool,))
    return extract


def _unreadable(name: str, text: str, why: str = "") -> str:
    line = " ".join(text.split())
    excerpt = f"{line[:200]!r}{'...' if len(line) > 200 else ''}"
    return f"A tool call in the format {name} cannot be read{why[:200]}: {excerpt}."


def _parser_for(
    parsers: dict[str, tuple[ToolParser, ChatCompletionRequest]],
    parser: type[ToolParser],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[ToolParser, ChatCompletionRequest]:
    """Return a parser and a request for these tools.

    They are made once for the same tools, because a parser reads the full vocabulary.
    """
    wrapped = [tool if "function" in tool else {"function": tool} for tool in tools]
    key = json.dumps(wrapped, sort_keys=True, default=str)
    if key not in parsers:
        whole = [{"type": "function", **tool} for tool in wrapped]
        request = ChatCompletionRequest(model="", messages=[], tools=whole, tool_choice=AUTO)
        try:
            parsers[key] = parser(tokenizer, request.tools), request
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"The tool parser {name!r} cannot work with this model's tokenizer: {error} Choose "
                f"the one that the model's card names."
            ) from error
    return parsers[key]
