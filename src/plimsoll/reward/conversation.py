"""Render a trajectory with a reward model's own tokenizer and chat template."""

from __future__ import annotations

from plimsoll.config.rl import StepsConfig
from plimsoll.data.pieces import TextPiece
from plimsoll.data.steps import step_parts, step_pieces
from plimsoll.data.template import Template
from plimsoll.data.tokenize import Tokenized, tokenize
from plimsoll.records import Trajectory


def conversation_tokens(
    trajectory: Trajectory, template: Template, steps: StepsConfig | None = None
) -> Tokenized:
    """Return two arrays [n]: a trajectory's tokens by the reward model's `template`, and a mask.

    With `steps`, the response is split into solution steps; the mask marks their last tokens.
    """
    pieces = _pieces(trajectory, template, steps)
    return tokenize(template.tokenizer, [pieces], template.begin, None)[0]


def _pieces(
    trajectory: Trajectory, template: Template, steps: StepsConfig | None
) -> tuple[TextPiece, ...]:
    prompt, response = trajectory.prompt.messages, trajectory.response_text
    if steps is None:
        return template.render_answer(prompt, [{"role": "assistant", "content": response}])
    texts = [part for part in response.split(steps.separator) if part.strip()] or [response]
    parts = step_parts(texts, steps.separator, plain=template.jinja is None)
    answer = [{"role": "assistant", "content": "".join(parts)}]
    return step_pieces(parts, template.render_answer(prompt, answer))
