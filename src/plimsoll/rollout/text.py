"""From sampled tokens to text, and the tokens that end a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationConfig

from plimsoll.config.model import ModelConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.template import Template
from plimsoll.errors import ConfigError
from plimsoll.model.checks import read_model_config
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Decoder:
    """The tokenizer of an engine's model, with which responses are decoded and their ends found."""

    def __init__(self, model: str, trust_remote_code: bool) -> None:
        self.tokenizer = load_tokenizer(model, trust_remote_code)
        self.end_tokens = end_tokens(model, self.tokenizer, trust_remote_code)

    def stops(self, tokens: Ints, sampling: SamplingConfig) -> bool:
        """Return whether one of the stop strings ends the response."""
        return self._stop(tokens, sampling) is not None

    def text(self, tokens: Ints, sampling: SamplingConfig) -> str:
        """Return the response as a person reads it: no special tokens, cut before a stop string."""
        return self._plain(tokens)[: self._stop(tokens, sampling)]

    def _stop(self, tokens: Ints, sampling: SamplingConfig) -> int | None:
        """Return where in the text the first stop string begins; None if there is none.

        It must end after the first `min_new_tokens` tokens, as in vLLM.
        """
        if not sampling.stop or len(tokens) <= sampling.min_new_tokens:
            return None
        text, least = self._plain(tokens), len(self._plain(tokens[: sampling.min_new_tokens]))
        places = [text.find(s, max(0, least - len(s) + 1)) for s in sampling.stop]
        return min((place for place in places if place >= 0), default=None)

    def _plain(self, tokens: Ints) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def end_tokens(
    model: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> tuple[int, ...]:
    """Return the ids of all end tokens of the model, its generation config and its tokenizer."""
    config = read_model_config(model, trust_remote_code)
    named = (tokenizer.eos_token_id, config.eos_token_id, _generation_end(model))
    lists = [
        tokens_named if isinstance(tokens_named, list) else [tokens_named] for tokens_named in named
    ]
    return tuple(sorted({token for tokens in lists for token in tokens if token is not None}))


def _generation_end(model: str) -> int | list[int] | None:
    try:
        end: int | list[int] | None = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model without generation_config.json
        return None
    return end


def check_turn_end(template: Template, model: ModelConfig, sampling: SamplingConfig) -> None:
    """Check that the token that ends the chat template's turns ends the engines' responses, too.

    If there is a stop string (`sampling.stop`), it may end responses instead.

    Raises:
        ConfigError: The token does not end responses. The message says where to add it.
    """
    end = template.turn_end()
    known = end_tokens(model.path, template.tokenizer, model.trust_remote_code)
    if end is None or sampling.stop:
        return
    token = template.tokenizer.convert_tokens_to_ids(end)
    if token not in known:
        names = ", ".join(map(str, template.tokenizer.convert_ids_to_tokens(list(known)))) or "none"
        raise ConfigError(
            f"The chat template ends the assistant's turns with {end} (token {token}), but the "
            f"tokens that end a response of {model.path} are: {names}. Every response would run on "
            f"to rollout.sampling.max_new_tokens. Add {token} to `eos_token_id` in the model's "
            f"generation_config.json (a list may stand there), or set `eos_token` in its "
            f"tokenizer_config.json to {end}."
        )
