"""Build requests to reward servers, and read their answers, in three forms of JSON.

Plimsoll: {"trajectories": [{"prompt", "messages", "response", "reference", "source", "columns",
"index", "group", "finish_reason", "prompt_tokens", "response_tokens"}, ...]} -> {"rewards": [number
or {"failed": text}, ...]}. "reference" is text; if the row's reference is not text,
"reference_value" has its JSON value.

OpenRLHF (openrlhf/utils/agent.py, openrlhf/cli/serve_rm.py): {"query": [...], "prompts": [...],
"labels": [...]} -> {"rewards": [...]}. A query is prompt and response together; labels are the
references as the rows have them.

vLLM (vllm/entrypoints/pooling/classify/protocol.py): {"input": [[token, ...], ...],
"use_activation": false, ...} -> {"data": [{"index", "probs": [score], ...}, ...]}. A score is the
output of the model's head, without activation. The tokens are those of the reward model's own
tokenizer and chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plimsoll.config.reward import StepsConfig
from plimsoll.data.fields import reference_text
from plimsoll.data.pieces import TextPiece, Tokenized, tokenize
from plimsoll.data.rows import step_parts, step_pieces
from plimsoll.data.template import Template
from plimsoll.records import FinishReason, Prompt, Trajectory, single_turn
from plimsoll.reward.outcome import Failed, Outcome, number, numbers, short_repr


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


AskServer = Callable[[Sequence[Trajectory]], dict[str, Any]]
"""Takes trajectories; returns the request for their rewards."""
Texts = Callable[[Trajectory], tuple[str, str]]
"""Takes a trajectory; returns prompt and response as texts, for a server of OpenRLHF's form."""
Tokens = Callable[[Trajectory], Sequence[int]]
"""Takes a trajectory; returns the tokens of its conversation, for a model that vLLM serves."""


def plimsoll_request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return a request to `plimsoll serve-reward`."""
    return {"trajectories": [_write(trajectory) for trajectory in trajectories]}


def openrlhf_request(texts: Texts) -> AskServer:
    """Return a function that builds requests in OpenRLHF's form from these texts."""

    def request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        pairs = [texts(trajectory) for trajectory in trajectories]
        return {
            "query": [prompt + response for prompt, response in pairs],
            "prompts": [prompt for prompt, _ in pairs],
            "labels": [trajectory.prompt.given_reference for trajectory in trajectories],
        }

    return request


def vllm_request(tokens: Tokens) -> AskServer:
    """Return a function that builds requests to vLLM's `/classify` from these tokens.

    vLLM cuts a conversation that is too long at its beginning.
    """

    def request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        return {
            "input": [[int(token) for token in tokens(t)] for t in trajectories],
            "add_special_tokens": False,
            "use_activation": False,
            "truncate_prompt_tokens": -1,
            "truncation_side": "left",
        }

    return request


def plain_texts(trajectory: Trajectory) -> tuple[str, str]:
    """Return prompt and response without chat template and special tokens."""
    return trajectory.prompt.text, trajectory.response_text


def texts_by(tokenizer: str | None) -> Texts:
    """Return a function from a trajectory to its texts, decoded by a tokenizer.

    The texts include chat template and special tokens, as in OpenRLHF (openrlhf/utils/agent.py).
    If `tokenizer` is None, return `plain_texts`.
    """
    if tokenizer is None:
        return plain_texts
    from transformers import AutoTokenizer  # heavy, and only where asked for

    decode = AutoTokenizer.from_pretrained(tokenizer).decode

    def texts(trajectory: Trajectory) -> tuple[str, str]:
        prompt = trajectory.prompt.tokens
        whole = np.concatenate([prompt, trajectory.response_tokens])
        before: str = decode(prompt, skip_special_tokens=False)
        return before, decode(whole, skip_special_tokens=False).removeprefix(before)

    return texts


def outcomes(reply: object, wanted: int) -> list[Outcome]:
    """Return one outcome for each of `wanted` trajectories, from a server's answer."""
    rewards = reply.get("rewards") if isinstance(reply, Mapping) else None
    if not isinstance(rewards, list):
        said = f' answered {short_repr(reply)}, and {{"rewards": [...]}} is needed'
        return [Failed(said, final=True)] * wanted
    if len(rewards) != wanted:
        return numbers(rewards, wanted)
    return [_outcome(reward) for reward in rewards]


def vllm_outcomes(reply: object, wanted: int) -> list[Outcome]:
    """Return one outcome for each of `wanted` trajectories, from vLLM's answer to `/classify`."""
    try:
        rows = sorted(reply["data"], key=lambda row: row["index"])  # type: ignore[index]
        scores = [row["probs"] for row in rows]
    except (KeyError, TypeError):
        needed = '{"data": [{"probs": [score]}, ...]} is needed, as vLLM\'s /classify answers'
        return [Failed(f" answered {short_repr(reply)}, and {needed}", final=True)] * wanted
    labels = {len(score) if isinstance(score, list) else 0 for score in scores}
    if labels - {1}:
        said = f" gave {short_repr(scores)}: a reward model has one label, and gives one score"
        return [Failed(said, final=True)] * wanted
    return numbers([score[0] for score in scores], wanted)


def _outcome(reward: object) -> Outcome:
    why = reward.get("failed") if isinstance(reward, Mapping) else None
    return Failed(f": {why}") if isinstance(why, str) else number(reward)


def read_request(body: Mapping[str, Any]) -> list[Trajectory]:
    """Return the trajectories of a request in Plimsoll's or OpenRLHF's form.

    In OpenRLHF's form, the response is the text after the prompt in the query. Raises ValueError,
    saying what is wrong, if the request has another form.
    """
    if "trajectories" in body:
        return [_read(item) for item in _list(body, "trajectories")]
    queries = _list(body, "query")
    prompts = _list(body, "prompts") if body.get("prompts") is not None else [""] * len(queries)
    labels = _list(body, "labels") if body.get("labels") is not None else [None] * len(queries)
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(
            f"there are {len(queries)} in query, {len(prompts)} in prompts, {len(labels)} in labels"
        )
    if not all(isinstance(text, str) for text in (*queries, *prompts)):
        raise ValueError("query and prompts are lists of texts")
    return [
        _read({"prompt": prompt, "response": query.removeprefix(prompt), "reference": label})
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    items = body.get(key)
    if not isinstance(items, list):
        raise ValueError(f'"{key}" is no list; {{"trajectories": [...]}} or {{"query": [...]}}')
    return items


def _write(trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "prompt": prompt.text,
        "messages": [dict(message) for message in prompt.messages],
        "is_text": prompt.is_text,
        "response": trajectory.response_text,
        "reference": prompt.reference,
        **({} if (value := prompt.reference_value) is None else {"reference_value": value}),
        "source": prompt.source,
        "columns": dict(prompt.columns),
        **({"named": dict(prompt.named)} if prompt.named else {}),
        "finish_reason": trajectory.finish_reason,
        "index": prompt.index,
        "group": trajectory.group,
        "prompt_tokens": prompt.tokens.tolist(),
        "response_tokens": trajectory.response_tokens.tolist(),
    }


def _read(item: object) -> Trajectory:
    if not isinstance(item, Mapping):
        raise ValueError(f"{short_repr(item)} is no trajectory")
    try:
        return _read_fields(item)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a field of {short_repr(item)} has a wrong type: {error}") from error


def _read_fields(item: Mapping[str, Any]) -> Trajectory:
    response, reference = item.get("response"), item.get("reference")
    value = item.get("reference_value", None if isinstance(reference, str) else reference)
    if not isinstance(response, str):
        raise ValueError(f"the response is text, not {short_repr(response)}")
    prompt = Prompt(
        int(item.get("index") or 0),
        np.asarray(item.get("prompt_tokens") or [], np.int32),
        str(item.get("prompt") or ""),
        None if reference is None else reference_text(reference),
        str(item.get("source") or ""),
        item.get("columns") or {},
        item.get("messages") or (),
        is_text=bool(item.get("is_text", not item.get("messages"))),
        reference_value=value,
        named=item.get("named") or {},
    )
    tokens = np.asarray(item.get("response_tokens") or [], np.int32)
    finish: FinishReason = "length" if item.get("finish_reason") == "length" else "stop"
    logprobs, group = np.zeros(tokens.shape, np.float32), int(item.get("group") or 0)
    return single_turn(prompt, 0, tokens, logprobs, response, finish, 0, group=group)
