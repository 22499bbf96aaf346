"""The rows that recorded runs learn from, with the columns of every job; none of it is random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def row(i: int) -> dict[str, Any]:
    """The i-th."""
    a, b = i * 7 % 23, i * 5 % 19
    prompt, answer = f"{a}+{b}=", str(a + b)
    steps = [f"{a} is {a}", f"{b} is {b + i % 2}", f"it is {answer}"][: 1 + i % 3]
    return {
        "prompt": prompt,
        "response": f" {a} #### {answer}",
        "answer": answer,
        "chosen": f" #### {answer}",
        "rejected": f" {'is ' * (i % 4)}{a + b + 1}",
        "margin": i % 5 / 4,
        "good": i % 3 != 0,
        "steps": steps,
        "labels": [i % 2 == 0 or k != 1 for k in range(len(steps))],
        "text": f"{prompt} is {answer}. " * (1 + i % 6),
        "messages": [
            {"role": "system", "content": "add"},
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ][i % 2 :],
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
