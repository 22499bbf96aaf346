"""What a reward server is asked and answers, as JSON: Plimsoll's form and OpenRLHF's.

Plimsoll: {"trajectories": [{"prompt", "messages", "response", "reference", "source", "columns",
"index", "group", "finish_reason", "prompt_tokens", "response_tokens"}, ...]} -> {"rewards": [number
or {"failed": text}, ...]}. A reference that is no text in its row is text there, too, and as the
row has it under "reference_value".

OpenRLHF (openrlhf/utils/agent.py, openrlhf/cli/serve_rm.py): {"query": [...], "prompts": [...],
"labels": [...]} -> {"rewards": [...]}, where a query is prompt and response, and labels are the
references as the rows have them.

vLLM (vllm/entrypoints/pooling/classify/protocol.py): {"input": [[token, ...], ...],
"use_activation": false, ...} -> {"data": [{"index", "probs": [score], ...}, ...]}, where scores are
those of the model's head: without activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plimsoll.data.fields import reference_text
from plimsoll.records import FinishReason, Prompt, Trajectory, single_turn
from plimsoll.reward.outcome import Broken, Failed, Outcome, number, numbers, shown

Ask = Callable[[Sequence[Trajectory]], dict[str, Any]]
"""Trajectories to what a server is asked."""
Texts = Callable[[Trajectory], tuple[str, str]]
"""Prompt and response as a server of OpenRLHF's is to see them."""
Tokens = Callable[[Trajectory], Sequence[int]]
"""A conversation as a model that vLLM serves is to read it."""


def plimsoll_request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """As `plimsoll serve-reward` is asked."""
    return {"trajectories": [_written(trajectory) for trajectory in trajectories]}


def openrlhf_request(texts: Texts) -> Ask:
    """As OpenRLHF asks."""

    def request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        pairs = [texts(trajectory) for trajectory in trajectories]
        return {
            "query": [prompt + response for prompt, response in pairs],
            "prompts": [prompt for prompt, _ in pairs],
            "labels": [trajectory.prompt.given_reference for trajectory in trajectories],
        }

    return request


def vllm_request(tokens: Tokens) -> Ask:
    """As vLLM's `/classify` is asked; a conversation that is longer than its model takes is cut at
    its beginning."""

    def request(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        return {
            "input": [[int(token) for token in tokens(one)] for one in trajectories],
            "add_special_tokens": False,
            "use_activation": False,
            "truncate_prompt_tokens": -1,
            "truncation_side": "left",
        }

    return request


def plain_texts(trajectory: Trajectory) -> tuple[str, str]:
    """Without chat template and special tokens."""
    return trajectory.prompt.text, trajectory.response_text


def texts_by(tokenizer: str | None) -> Texts:
    """By the tokenizer of this model: as the actor saw and wrote them, with chat template and
    special tokens, as OpenRLHF decodes them (openrlhf/utils/agent.py). None: `plain_texts`."""
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
    """What a server answered, for each trajectory that it was asked about."""
    rewards = reply.get("rewards") if isinstance(reply, Mapping) else None
    if not isinstance(rewards, list):
        said = f' answered {shown(reply)}, and {{"rewards": [...]}} is needed'
        return [Broken(said)] * wanted
    if len(rewards) != wanted:
        return numbers(rewards, wanted)
    return [_outcome(one) for one in rewards]


def vllm_outcomes(reply: object, wanted: int) -> list[Outcome]:
    """As `outcomes`, of vLLM's `/classify`."""
    try:
        rows = sorted(reply["data"], key=lambda row: row["index"])  # type: ignore[index]
        scores = [row["probs"] for row in rows]
    except (KeyError, TypeError):
        said = f' answered {shown(reply)}, and {{"data": [{{"probs": [score]}}, ...]}} is needed'
        return [Broken(f"{said}, as vLLM's /classify answers")] * wanted
    labels = {len(own) if isinstance(own, list) else 0 for own in scores}
    if labels - {1}:
        said = f" gave {shown(scores)}: a reward model has one label, and gives one score"
        return [Broken(said)] * wanted
    return numbers([own[0] for own in scores], wanted)


def _outcome(one: object) -> Outcome:
    said = one.get("failed") if isinstance(one, Mapping) else None
    return Failed(f": {said}") if isinstance(said, str) else number(one)


def read_request(body: Mapping[str, Any]) -> list[Trajectory]:
    """What a server is asked, in either form. Of OpenRLHF's, the response is what follows the
    prompt in the query.

    Raises ValueError, saying what is wrong.
    """
    if "trajectories" in body:
        return [_read(one) for one in _list(body, "trajectories")]
    queries = _list(body, "query")
    prompts = _list(body, "prompts") if body.get("prompts") is not None else [""] * len(queries)
    labels = _list(body, "labels") if body.get("labels") is not None else [None] * len(queries)
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(
            f"there are {len(queries)} in query, {len(prompts)} in prompts, {len(labels)} in labels"
        )
    return [
        _read({"prompt": prompt, "response": str(query).removeprefix(prompt), "reference": label})
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    if not isinstance(found, list):
        raise ValueError(f'"{key}" is no list; {{"trajectories": [...]}} or {{"query": [...]}}')
    return found


def _written(trajectory: Trajectory) -> dict[str, Any]:
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
        "finish_reason": trajectory.finish_reason,
        "index": prompt.index,
        "group": trajectory.group,
        "prompt_tokens": prompt.tokens.tolist(),
        "response_tokens": trajectory.response_tokens.tolist(),
    }


def _read(one: object) -> Trajectory:
    if not isinstance(one, Mapping):
        raise ValueError(f"{shown(one)} is no trajectory")
    response, reference = one.get("response"), one.get("reference")
    value = one.get("reference_value", None if isinstance(reference, str) else reference)
    if not isinstance(response, str):
        raise ValueError(f"the response is text, not {shown(response)}")
    prompt = Prompt(
        int(one.get("index") or 0),
        np.asarray(one.get("prompt_tokens") or [], np.int64),
        str(one.get("prompt") or ""),
        None if reference is None else reference_text(reference),
        str(one.get("source") or ""),
        one.get("columns") or {},
        one.get("messages") or (),
        is_text=bool(one.get("is_text", not one.get("messages"))),
        reference_value=value,
    )
    tokens = np.asarray(one.get("response_tokens") or [], np.int64)
    finish: FinishReason = "length" if one.get("finish_reason") == "length" else "stop"
    logprobs, group = np.zeros(tokens.shape, np.float32), int(one.get("group") or 0)
    return single_turn(prompt, 0, tokens, logprobs, response, finish, 0, group=group)
