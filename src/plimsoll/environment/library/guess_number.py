"""A game: guess a whole number; each guess is answered with higher or lower."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from plimsoll.environment.protocol import Message, Reply, Step
from plimsoll.errors import ConfigError

_NUMBER = re.compile(r"(?<![\d.])[+-]?\d{1,15}(?![\d]|\.\d)")


class GuessNumber:
    """A game in which the policy guesses the row's column `number`.

    Without this column the number is drawn from the row and its seed, so that all episodes of a
    group have the same. If the row has no prompt, the environment tells the rules. A reply's last
    whole number is its guess; a reply without one counts, too.

    The reward is 1 if the number was guessed. Otherwise it is up to a half, the more the nearer the
    last guess was, and 0 without a guess.
    """

    def __init__(self, *, low: int = 1, high: int = 100, guesses: int = 7) -> None:
        """Check the options.

        Args:
            low: the least number.
            high: the greatest number.
            guesses: how many guesses the policy has.
        """
        if not low < high or guesses < 1:
            raise ConfigError(
                f"guess_number needs low < high and at least one guess, and has low {low}, high "
                f"{high}, guesses {guesses}."
            )
        self._low, self._high, self._guesses = low, high, guesses
        self._number, self._used = low, 0
        self._last: int | None = None

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start an episode; return the rules as a message, or nothing if the row has a prompt.

        Raises ConfigError for a number that is not within the bounds.
        """
        number = row.get("number", draw_number(row, self._low, self._high))
        if not isinstance(number, int) or not self._low <= number <= self._high:
            raise ConfigError(
                f"The row's number is {number!r}, and guess_number needs a whole one from "
                f"{self._low} to {self._high}: set its options `low` and `high`."
            )
        self._number, self._used, self._last = number, 0, None
        prompt = row.get("prompt", row.get("messages"))
        return [] if prompt else [Message("user", rules(self._low, self._high, self._guesses))]

    def step(self, reply: Reply) -> Step:
        """Return "higher" or "lower" for the reply's guess, or end the episode."""
        self._used += 1
        guess = read_guess(reply.text)
        self._last = self._last if guess is None else guess
        done = guess == self._number or self._used >= self._guesses
        figures = {"guesses": float(self._used), "found": float(guess == self._number)}
        return Step(self._answer(guess), done, figures=figures if done else {})

    def get_reward(self) -> float:
        """Return the reward, from 0 to 1; see the class."""
        if self._last is None:
            return 0.0
        if self._last == self._number:
            return 1.0
        away = abs(self._last - self._number) / (self._high - self._low)
        return 0.5 * max(0.0, 1.0 - away)

    def _answer(self, guess: int | None) -> str:
        left = self._guesses - self._used
        if guess is None:
            answer = f"Answer with a whole number from {self._low} to {self._high}."
        elif guess == self._number:
            return f"{guess} is the number."
        else:
            answer = f"The number is {'higher' if guess < self._number else 'lower'} than {guess}."
        return f"{answer} {left} {'guess is' if left == 1 else 'guesses are'} left."


def rules(low: int, high: int, guesses: int) -> str:
    """Return the rules of the game for the policy."""
    return (
        f"Guess the whole number from {low} to {high} that I think of. You have {guesses} guesses; "
        f"after each I say whether the number is higher or lower. Answer with a number alone."
    )


def read_guess(text: str) -> int | None:
    """Return the last whole number of a text; None if there is none."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None


def draw_number(row: Mapping[str, Any], low: int, high: int) -> int:
    """Return a number between the bounds, always the same for the same row."""
    text = json.dumps(dict(row), sort_keys=True, default=str)
    return low + zlib.crc32(text.encode("utf-8", "replace")) % (high - low + 1)
