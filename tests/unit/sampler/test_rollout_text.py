"""The tokens that end a response, against those that a chat template ends turns with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decided import decided_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError
from plimsoll.model.tiny import tiny_config
from plimsoll.sampler.text import Ending, check_turn_end, end_tokens, ending

TURNS = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
END_OF_TEXT, END_OF_TURN = 0, 1


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A base model's: texts end with <|endoftext|>; the end of a turn is only known."""
    backend = Tokenizer(models.BPE({}, []))
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = tiny_config("qwen2", True, vocab=32, hidden=32, feed_forward=48)
    config.eos_token_id = END_OF_TEXT
    config.save_pretrained(tmp_path)
    return tmp_path


def check(model: Path, tokenizer: PreTrainedTokenizerFast, *stop: str) -> None:
    template = make_template(tokenizer, TURNS, None)
    check_turn_end(
        template, decided_model(path=str(model), dtype="bfloat16"), SamplingConfig(stop=stop)
    )


def known(model: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    return end_tokens(str(model), tokenizer, False)


def test_an_end_of_turn_that_engines_would_sample_past_is_refused(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert known(model, tokenizer) == (END_OF_TEXT,)
    with pytest.raises(ConfigError) as caught:
        check(model, tokenizer)
    told = str(caught.value)
    assert "<|im_end|> (token 1)" in told and "are: <|endoftext|>." in told
    assert "generation_config.json" in told and "rollout.sampling.max_new_tokens" in told
    assert "rollout.sampling.stop" in told
    for stop in ("</answer>", "<|im_end|>", "<|im_end|>\n"):
        check(model, tokenizer, stop)
    with pytest.raises(ConfigError):
        check(model, tokenizer, "<|endoftext|>")


def test_stop_strings_that_are_special_tokens_are_end_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stop = ("<|im_end|>", "</answer>")
    ways = ending(tokenizer, (END_OF_TEXT,), stop)
    assert ways == Ending((END_OF_TEXT, END_OF_TURN), ("</answer>",), shows_special=False)
    longer = ending(tokenizer, (END_OF_TEXT,), ("<|im_end|>\n",))
    assert longer == Ending((END_OF_TEXT,), ("<|im_end|>\n",), shows_special=True)


@pytest.mark.parametrize("ends", [END_OF_TURN, [END_OF_TEXT, END_OF_TURN]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_the_models_files_name_is_known(
    model: Path, tokenizer: PreTrainedTokenizerFast, ends: int | list[int], file: str
) -> None:
    path = model / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {"eos_token_id": ends}))
    assert known(model, tokenizer) == (END_OF_TEXT, END_OF_TURN)
    check(model, tokenizer)


def test_the_tokenizers_own_end_is_known(model: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = "<|im_end|>"
    check(model, tokenizer)
