"""What the free text of a published row says of a policy that is trained by reinforcement."""

from __future__ import annotations

import re

from peak_numbers import NotKnown, Text


def completion(text: Text) -> int | None:
    """Tokens of each sequence of TRL's GRPO that have logits: those of the completion; None for
    every other task. NotKnown where the row leaves open what else is on the card."""
    if not _by_trl(text):
        return None
    said = f"{text['task']} {text['notes']}"
    alone = r"\b(?:no|without) vllm|use_vllm\W{0,3}false|transformers generates"
    unread = r"\bbeta ?=? ?0(?:\.0*)?\b|\b(?:no|without)(?: an?| the)? ref"
    length = re.search(r"completion[_ ]len(?:gth)?\W{0,3}(?:of )?(\d+)|completions of (\d+)", said)
    frozen = "lora" in text["peft"] or re.search(unread, said)
    if length is None or not frozen or not re.search(alone, said):
        raise NotKnown("task", text["task"])
    return int(length[1] or length[2])


def _by_trl(text: Text) -> bool:
    """And the whole of it: its rollouts' engine is not left out."""
    named = re.search(r"\bgrpo", text["task"]) and "trainer only" not in text["task"]
    return bool(named and re.search(r"\btrl\b|grpotrainer", f"{text['source']} {text['task']}"))
