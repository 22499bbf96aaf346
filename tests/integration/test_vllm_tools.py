"""vLLM's tool parsers, behind the same interface as our own."""

from __future__ import annotations

import pytest

from plimsoll.config.rollout import RolloutConfig
from plimsoll.environment.protocol import ToolCall
from plimsoll.environment.tool_calls import read_reply
from plimsoll.errors import ConfigError
from plimsoll.model.tiny import train_tokenizer
from plimsoll.records import ExtractCalls
from plimsoll.sampler.protocol import calls_by_engine

pytestmark = pytest.mark.engine

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
                "required": ["expression"],
            },
        },
    },
)
TAGS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
QWEN = "<tool_call>\n<function=calculate>\n%s\n</function>\n</tool_call>"
RIGHT = {
    "llama3_json": '{"name": "calculate", "parameters": {"expression": "1+1", "digits": 2}}',
    "mistral": '[TOOL_CALLS]calculate[ARGS]{"expression": "1+1", "digits": 2}',
    "qwen3_coder": QWEN
    % "<parameter=expression>\n1+1\n</parameter>\n<parameter=digits>\n2\n</parameter>",
    "hermes": '<tool_call>{"name": "calculate", "arguments": '
    '{"expression": "1+1", "digits": 2}}</tool_call>',
    "pythonic": '[calculate(expression="1+1", digits=2)]',
}
OLD_MISTRAL = '[TOOL_CALLS][{"name": "calculate", "arguments": {"expression": "1+1", "digits": 2}}]'


def extract(name: str, *tags: str, engine: str = "vllm") -> ExtractCalls:
    tokenizer = train_tokenizer(["calculate an expression 1 2 3"], 300)
    tokenizer.add_tokens([*TAGS, *tags])
    rollout = RolloutConfig.model_validate({engine: {}})
    return calls_by_engine(rollout, name, tokenizer)


def own(name: str) -> ExtractCalls:
    return extract(name, *(["[ARGS]"] if name == "mistral" else []))


@pytest.mark.parametrize("name", RIGHT)
def test_a_call_is_read(name: str) -> None:
    reply = read_reply(RIGHT[name], TOOLS, own(name))
    assert reply.tool_calls == (ToolCall("calculate", {"expression": "1+1", "digits": 2}),)
    assert reply.problem is None
    assert reply.message.content == ""


def test_mistral_before_its_eleventh_tokenizer() -> None:
    reply = read_reply(OLD_MISTRAL, TOOLS, extract("mistral"))
    assert reply.tool_calls == (ToolCall("calculate", {"expression": "1+1", "digits": 2}),)


def test_the_id_that_mistral_writes_with_a_call_is_kept() -> None:
    text = OLD_MISTRAL.replace("}}]", '}, "id": "VvvODy9mT"}]')
    [call] = read_reply(text, TOOLS, extract("mistral")).tool_calls
    assert call == ToolCall("calculate", {"expression": "1+1", "digits": 2}, "VvvODy9mT")


@pytest.mark.parametrize("name", RIGHT)
def test_text_is_no_call(name: str) -> None:
    reply = read_reply("It is {2}, or [2].", TOOLS, own(name))
    assert (reply.tool_calls, reply.problem) == ((), None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("llama3_json", '{"name": "calculate", "parameters": {"expr', "llama3_json cannot be read"),
        ("mistral", '[TOOL_CALLS]calculate[ARGS]{"expression": "1', "are not valid JSON"),
        ("qwen3_coder", '<tool_call>{"name": "calculate"}</tool_call>', "qwen3_coder cannot be"),
        ("qwen3_coder", QWEN % "<parameter=digits>\n2\n</parameter>", "'expression' is a required"),
        ("hermes", '<tool_call>{"name": "calc', "hermes cannot be read"),
        ("pythonic", '[calculate(expression="1+1"', "pythonic cannot be read"),
    ],
)
def test_a_malformed_call_has_a_problem(name: str, text: str, said: str) -> None:
    reply = read_reply(text, TOOLS, own(name))
    assert reply.tool_calls == ()
    assert reply.problem is not None and said in reply.problem


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_parser_that_vllm_does_not_have(engine: str) -> None:
    """An engine without parsers takes vLLM's."""
    with pytest.raises(ConfigError, match=r"'hermez'.*'hermes'\?"):
        extract("hermez", engine=engine)


def test_a_tokenizer_without_the_formats_tokens() -> None:
    with pytest.raises(ConfigError, match=r"'deepseek_v3' .*tokenizer"):
        extract("deepseek_v3")
