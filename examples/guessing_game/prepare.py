"""Make everything that the example needs: games, demonstrations, tokenizer, random model.

    python examples/guessing_game/prepare.py --out runs/guessing_game

A game is a number from 1 to 7, which the player is to find with three guesses. The prompts ask in
many ways, some of which are held out. Half of those who play the demonstrations heed whether they
are told higher or lower, and guess at random among the numbers that are left; the others guess
among all numbers every time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.environment.library.guess_number import GuessNumber
from plimsoll.environment.protocol import Message, Reply
from plimsoll.model.tiny import write_chat_model
from plimsoll.run.json_lines import write_rows

LOW, HIGH, GUESSES = 1, 7, 3
"""7 numbers are as many as 3 guesses can always tell apart."""
GREETINGS = ("Hello.", "Hi there.", "Good morning.", "Welcome back.", "Let us play.", "Ready?")
REQUESTS = (
    "Guess my number from 1 to 7.",
    "Find my number. It is from 1 to 7.",
    "I think of a number from 1 to 7.",
    "From 1 to 7, what is my number?",
    "Which number from 1 to 7 is mine?",
)
HELD_OUT = 6
"""Of the 30 ways to ask."""
DEMONSTRATIONS = 4000
HEEDFUL = 0.5
"""The share of demonstrations that heed what they are told."""


@dataclass(frozen=True)
class Game:
    prompt: str
    number: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="where rows and model are written")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    rng = np.random.default_rng(options.seed)
    ways = [f"{greeting} {request}" for greeting in GREETINGS for request in REQUESTS]
    order = [ways[i] for i in rng.permutation(len(ways))]
    test, train = list(games(order[:HELD_OUT])), list(games(order[HELD_OUT:]))
    chosen = [train[i] for i in rng.integers(len(train), size=DEMONSTRATIONS)]
    played = [demonstration(game, rng) for game in chosen]
    write_rows(out / "sft.jsonl", ({"messages": messages} for messages in played))
    for name, own in (("train", train), ("test", test)):
        rows = ({"prompt": game.prompt, "number": game.number} for game in own)
        write_rows(out / f"{name}.jsonl", rows)
    write_chat_model(out / "model", map(json.dumps, played), options.seed)
    print(f"{out}: {len(train):,} games, {len(test):,} held out, and a random model")
    return 0


def games(prompts: Sequence[str]) -> Iterator[Game]:
    """All that can be played."""
    for prompt in prompts:
        yield from (Game(prompt, number) for number in range(LOW, HIGH + 1))


def demonstration(game: Game, rng: np.random.Generator) -> list[dict[str, Any]]:
    """A game from its beginning to its end, as the environment tells it."""
    heedful = rng.random() < HEEDFUL
    environment = GuessNumber(low=LOW, high=HIGH, guesses=GUESSES)
    environment.reset({"prompt": game.prompt, "number": game.number})
    messages, low, high = [{"role": "user", "content": game.prompt}], LOW, HIGH
    while True:
        guess = int(rng.integers(low, high + 1))
        said = Message("assistant", str(guess))
        step = environment.step(Reply(said.content, said, (), None))
        messages.append({"role": said.role, "content": said.content})
        if step.done:
            return messages
        messages.append({"role": "user", "content": str(step.observation)})
        if heedful:
            low, high = (guess + 1, high) if guess < game.number else (low, guess - 1)


if __name__ == "__main__":
    sys.exit(main())
