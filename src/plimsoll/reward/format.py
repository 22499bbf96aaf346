"""Reward for a response that first thinks and then answers, each within tags."""

from __future__ import annotations

from plimsoll.records import Trajectory


def reward(
    trajectory: Trajectory, *, think: str = "think", answer: str = "answer", opened: bool = False
) -> float:
    """Return 1 if the response is `<think>...</think><answer>...</answer>` and no more, else 0.

    Each tag must occur exactly once, and neither part may be empty. Set `opened` if the chat
    template already ends with the first tag, so that the response begins after it.
    """
    text = trajectory.response_text.strip()
    if opened and f"<{think}>" not in text:
        text = f"<{think}>{text}"
    at, parts = 0, []
    for tag in (think, answer):
        begin, end = f"<{tag}>", f"</{tag}>"
        if text.count(begin) != 1 or text.count(end) != 1 or not text[at:].startswith(begin):
            return 0.0
        closed = text.find(end, at)
        parts.append(text[at + len(begin) : closed])
        at = closed + len(end)
        at += len(text[at:]) - len(text[at:].lstrip())
    return float(at == len(text) and all(part.strip() for part in parts))
