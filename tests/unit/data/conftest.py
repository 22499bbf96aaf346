"""A tokenizer in which every byte is a token, so that expected tokens can be marked by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with ChatML's template, which ends turns with <|im_end|>."""
    made = byte_tokenizer(eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


@pytest.fixture(scope="session")
def base_tokenizer() -> PreTrainedTokenizerFast:
    """Return a base model's tokenizer: no chat template, and <s> before every text."""
    made = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    return made
