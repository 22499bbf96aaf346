"""From sampled tokens to text, and the tokens that end a response."""

from __future__ import annotations

from plimsoll.model.load import load_tokenizer, read_model_config
from plimsoll.records import Ints


class Decoder:
    """The tokenizer of an engine's model, for what comes out of it."""

    def __init__(self, model: str, trust_remote_code: bool) -> None:
        self.tokenizer = load_tokenizer(model, trust_remote_code)
        self.end_tokens = _end_tokens(
            self.tokenizer.eos_token_id, read_model_config(model, trust_remote_code).eos_token_id
        )

    def stops(self, tokens: Ints, stop: tuple[str, ...]) -> bool:
        """Whether one of the stop strings is in the response."""
        text = self._plain(tokens)
        return any(mark in text for mark in stop)

    def text(self, tokens: Ints, stop: tuple[str, ...]) -> str:
        """The response as a person reads it: without special tokens, cut before a stop string."""
        text = self._plain(tokens)
        for mark in stop:
            text = text.split(mark, 1)[0]
        return text

    def _plain(self, tokens: Ints) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def _end_tokens(tokenizer_eos: int | None, config_eos: int | list[int] | None) -> tuple[int, ...]:
    """Every token that the model or the tokenizer calls an end of sequence."""
    from_config = config_eos if isinstance(config_eos, list) else [config_eos]
    return tuple(sorted({t for t in (tokenizer_eos, *from_config) if t is not None}))
