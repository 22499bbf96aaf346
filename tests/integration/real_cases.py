"""Small tasks for SmolLM2, and what plain transformers computes for them, row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import metrics, run, write_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Messages = list[dict[str, str]]

ANSWERS = [
    ("What is the capital of France?", "The capital of France is Paris.", "It is London."),
    ("Name a colour.", "Blue.", "Colours are nice, I think, but I would rather not say."),
    ("What is 17 + 8?", "17 + 8 = 25", "17 + 8 = 24"),
    ("Translate 'Haus' into English.", "'Haus' means house.", "No."),
]
"""A question, a good answer and a bad one."""
HELD_OUT = [
    ("What is the capital of Spain?", "The capital of Spain is Madrid.", "It is Rome."),
    ("What is 4 + 9?", "4 + 9 = 13", "4 + 9 = 14"),
]
PAIRS = {"prompt": "question", "chosen": "good", "rejected": "bad"}


def write_questions(home: Path) -> None:
    """Write the rows of every job: learned ones, and held-out ones."""
    for name, answers in (("rows", ANSWERS), ("held_out", HELD_OUT)):
        rows = [{"question": q, "good": good, "bad": bad} for q, good, bad in answers]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        labelled = [
            {"question": q, "answer": answer, "is_good": answer == good}
            for q, good, bad in answers
            for answer in (good, bad)
        ]
        text = "".join(json.dumps(row) + "\n" for row in labelled)
        (home / f"labelled_{name}.jsonl").write_text(text)


def base_config(
    directory: str, model: Path, columns: Mapping[str, str], batch: Mapping[str, int]
) -> dict[str, Any]:
    """Return a run of one step on all rows at once, in float32, that keeps no checkpoint."""
    prefix = "labelled_" if "label" in columns else ""
    return {
        "run": {"directory": directory, "steps": 1, "eval_every": 1, "keep_checkpoints": 0}
        | {"tensorboard": False},
        "cluster": {"where": "local", "device": "cpu", "threads": 1},
        "data": {
            "train": {"path": f"{prefix}rows.jsonl", **columns},
            "eval": {"path": f"{prefix}held_out.jsonl", **columns},
            "max_tokens": 128,
            "shuffle": False,
        },
        "batch": {**batch, "micro_batch_tokens": 256},
        "actor": {
            "model": {"path": str(model), "dtype": "float32"},
            "optimizer": {"learning_rate": 1e-5},
        },
    }


def train(home: Path, job: str, config: dict[str, Any], *words: str) -> list[dict[str, Any]]:
    """Run a job; return its metrics.

    It has a process of its own: in this one a trained engine would keep its gigabytes.
    """
    directory = config["run"]["directory"]
    write_config(home, directory, config)
    outcome = run(home, job, f"{directory}.yaml", *words)
    assert outcome.code == 0, outcome.err
    return metrics(home / directory)


def load_policy(path: Path) -> Any:
    """Return the model by plain transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def response_logprobs(model: Any, path: Path, question: str, answer: str) -> Tensor:
    """Return the log-probs of an answer's tokens and of the token that ends the turn."""
    tokens, prompt = chat_tokens(path, question, answer)
    return continuation_logprobs(model, tokens, prompt)


def continuation_logprobs(model: Any, tokens: Sequence[int], prompt: int) -> Tensor:
    """Return the log-probs of all tokens after the first `prompt` ones."""
    tokens_T = torch.tensor(tokens)
    logits_TV = model(tokens_T[None], use_cache=False).logits[0, prompt - 1 : -1].float()
    logprobs_T: Tensor = logits_TV.log_softmax(-1).gather(1, tokens_T[prompt:, None])[:, 0]
    return logprobs_T


def chat_tokens(path: Path, question: str, answer: str) -> tuple[list[int], int]:
    """Return the tokens of a chat up to the end of its last turn, and how many are the prompt's."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked: Messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answered = [*asked, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert whole.startswith(prompt) and whole.endswith("<|im_end|>\n")
    tokens = tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    return tokens, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def response_sums(
    model: Any, path: Path, answers: Sequence[tuple[str, str, str]]
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all good answers, and of all bad ones."""
    good, bad = (
        [response_logprobs(model, path, row[0], row[side]).sum() for row in answers]
        for side in (1, 2)
    )
    return torch.stack(good), torch.stack(bad)
