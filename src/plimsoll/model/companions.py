"""What is saved beside a model's weights: its tokenizer, with the chat template that the model was
trained with, and how it generates.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from plimsoll.data.template import make_template


@dataclass(frozen=True, eq=False)
class Companions:
    """generation: None for a model that scores."""

    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None


def companions(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Companions:
    """Those of a trained model.

    tokenizer: of the model that training began with, read anew.
    template: Jinja that the model was trained with instead of the tokenizer's own: the tokenizer
        gets it, and the token that ends its turns ends what the model generates.
    """
    generation = deepcopy(lm.generation_config) if lm.can_generate() else None
    if template is not None:
        tokenizer.chat_template = template
        end = make_template(tokenizer, template, None).turn_end()
        if generation is not None and end is not None:
            token = int(tokenizer.convert_tokens_to_ids(end))
            generation.eos_token_id = _with_end(generation.eos_token_id, token)
    return Companions(tokenizer, generation)


def _with_end(ends: int | list[int] | None, token: int) -> int | list[int]:
    """One token stays a number, as the files of most models have it."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in known:
        return token if ends == token else known
    return [*known, token] if known else token


def write_generation(generation: GenerationConfig, directory: Path) -> None:
    """Write generation_config.json as it is: `save_pretrained` refuses settings that transformers
    only warns of where it reads them, as Llama 2 was published with."""
    generation.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
