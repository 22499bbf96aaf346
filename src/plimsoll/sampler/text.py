"""From sampled tokens to text, and the tokens that end a response."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from plimsoll.config.engine import ModelConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.template import Template
from plimsoll.errors import ConfigError
from plimsoll.model.checks import read_model_config
from plimsoll.model.load import load_tokenizer
from plimsoll.records import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Ending:
    """What ends a response."""

    tokens: tuple[int, ...]
    """The ids of the model's end tokens, and of stop strings that are special tokens."""
    strings: tuple[str, ...]
    """The other stop strings."""
    shows_special: bool
    """Whether a stop string has a special token in it, so that it must be sought in text that has
    them."""


@lru_cache(maxsize=16)
def ending(
    tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], stop: tuple[str, ...]
) -> Ending:
    """Return what ends a response, from the model's end tokens and `sampling.stop`."""
    specials = _special_tokens(tokenizer)
    tokens = {*ends, *(specials[string] for string in stop if string in specials)}
    strings = tuple(string for string in stop if string not in specials)
    shows_special = any(special in string for string in strings for special in specials)
    return Ending(tuple(sorted(tokens)), strings, shows_special)


@lru_cache(maxsize=16)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder.items()
    return {str(token): number for number, token in added if token.special}


class Decoder:
    """The tokenizer of an engine's model, with which responses are decoded and their ends found."""

    def __init__(self, model: str, trust_remote_code: bool) -> None:
        self.tokenizer = load_tokenizer(model, trust_remote_code)
        self.end_tokens = end_tokens(model, self.tokenizer, trust_remote_code)

    def ending(self, sampling: SamplingConfig) -> Ending:
        """Return what ends a response."""
        return ending(self.tokenizer, self.end_tokens, sampling.stop)

    def stops(self, tokens: TokenIds, sampling: SamplingConfig) -> bool:
        """Return whether one of the stop strings ends the response."""
        return self._before_stop(tokens, sampling) is not None

    def text(self, tokens: TokenIds, sampling: SamplingConfig) -> str:
        """Return the response as a person reads it: no special tokens, cut before a stop string."""
        before = self._before_stop(tokens, sampling)
        if before is None:
            return self._decode(tokens, special=False)
        shown = _special_tokens(self.tokenizer) if self.ending(sampling).shows_special else ()
        for special in shown:
            before = before.replace(special, "")
        return before

    def _before_stop(self, tokens: TokenIds, sampling: SamplingConfig) -> str | None:
        """Return the text before the first stop string; None if there is none.

        It must end after the first `min_new_tokens` tokens, as in vLLM.
        """
        ending = self.ending(sampling)
        if not ending.strings or len(tokens) <= sampling.min_new_tokens:
            return None
        text = self._decode(tokens, ending.shows_special)
        least = len(self._decode(tokens[: sampling.min_new_tokens], ending.shows_special))
        places = [text.find(s, max(0, least - len(s) + 1)) for s in ending.strings]
        place = min((place for place in places if place >= 0), default=None)
        return None if place is None else text[:place]

    def _decode(self, tokens: TokenIds, special: bool) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=not special))


def end_tokens(
    model: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> tuple[int, ...]:
    """Return the ids of all end tokens of the model, its generation config and its tokenizer."""
    named = [tokenizer.eos_token_id, read_model_config(model, trust_remote_code).eos_token_id]
    with suppress(OSError):  # a model without generation_config.json
        named.append(GenerationConfig.from_pretrained(model).eos_token_id)
    lists = [tokens if isinstance(tokens, list) else [tokens] for tokens in named]
    return tuple(sorted({token for tokens in lists for token in tokens if token is not None}))


def check_turn_end(template: Template, model: ModelConfig, sampling: SamplingConfig) -> None:
    """Check that the token that ends the chat template's turns ends the engines' responses, too.

    A stop string (`sampling.stop`) may end responses instead.

    Raises:
        ConfigError: The token does not end responses. The message says where to add it.
    """
    end = template.turn_end()
    known = end_tokens(model.path, template.tokenizer, model.trust_remote_code)
    if end is None:
        return
    ways = ending(template.tokenizer, known, sampling.stop)
    token = template.tokenizer.convert_tokens_to_ids(end)
    if token not in ways.tokens and not ways.strings:
        names = ", ".join(map(str, template.tokenizer.convert_ids_to_tokens(list(known)))) or "none"
        raise ConfigError(
            f"The chat template ends the assistant's turns with {end} (token {token}), but the "
            f"tokens that end a response of {model.path} are: {names}. Every response would run on "
            f"to rollout.sampling.max_new_tokens. Add {token} to `eos_token_id` in the model's "
            f"generation_config.json (a list may stand there), or {end} to rollout.sampling.stop."
        )
