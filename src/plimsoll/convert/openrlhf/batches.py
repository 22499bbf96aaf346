"""Lengths, batches and micro-batches, which are sequences there and tokens here; and how long a run
is."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

LENGTHS = ("prompt_max_len", "generate_max_len", "max_len", "max_new_tokens")


def rollout_lengths(o: Options) -> tuple[int, int]:
    """(the longest prompt, the longest response), in tokens."""
    if o["prompt_max_len"] is not None:
        return o["prompt_max_len"], o["generate_max_len"]
    total, response = o["max_len"], o["max_new_tokens"]
    if response is None:
        return total // 2, total - total // 2
    if response >= total:
        raise ConfigError(
            f"{o.shown('max_new_tokens')} leaves no room for a prompt in {o.shown('max_len')}, "
            f"which is of both together. Give a larger {o.names['max_len']}."
        )
    return total - response, response


def longest_sequence(o: Options) -> int:
    """In tokens."""
    return sum(rollout_lengths(o)) if o.rl else int(o["max_len"])


def lengths(o: Options) -> Iterator[Outcome]:
    if not o.rl:
        yield o.entry("data.max_tokens", o["max_len"], "max_len")
    else:
        yield from _rollout_lengths(o)
    yield o.entry("data.over_long", "truncate", note="OpenRLHF cuts what is longer")


def _rollout_lengths(o: Options) -> Iterator[Outcome]:
    prompt, response = rollout_lengths(o)
    note = ""
    if o["prompt_max_len"] is not None:
        of_prompt, of_response = ["prompt_max_len"], ["generate_max_len"]
        why = "a sequence is as long as prompt and response may be"
        yield from o.idle(why, "max_len")
    else:
        of_prompt, of_response = ["max_len", "max_new_tokens"], ["max_new_tokens"]
        note = "max_len less the longest response"
        if o["max_new_tokens"] is None:
            note, of_response = "half of max_len", ["max_len", "max_new_tokens"]
            why = "max_len is of prompt and response together; here each has a limit of its own, "
            why += "half of it: shift them where prompts are short"
            yield Remark("check", "rollout.sampling.max_new_tokens", why)
    yield o.entry("data.max_tokens", prompt, *of_prompt, note=note)
    yield o.entry("rollout.sampling.max_new_tokens", response, *of_response)


def micro_batches(o: Options) -> Iterator[Outcome]:
    longest = longest_sequence(o)
    together = 2 * longest if o.pairs else longest
    what = "pairs of sequences" if o.pairs else "sequences"
    if o["use_dynamic_batch"]:
        tokens = max(o["train_max_tokens_per_gpu"], together)
        note = "raised to the longest sequence" if tokens > o["train_max_tokens_per_gpu"] else ""
        asked = ("train_max_tokens_per_gpu", "use_dynamic_batch")
        yield o.entry("batch.micro_batch_tokens", tokens, *asked, note=note)
        yield from o.idle("a token budget is given", "micro_train_batch_size")
        return
    number = o["micro_train_batch_size"]
    note = f"{number} {what} of at most {longest} tokens"
    flags = ("micro_train_batch_size", *LENGTHS)
    yield o.entry("batch.micro_batch_tokens", number * together, *flags, note=note)
    why = f"{o.names.get('use_dynamic_batch', '--use_dynamic_batch')} is not given"
    yield from o.idle(why, "train_max_tokens_per_gpu")


def batches(o: Options) -> Iterator[Outcome]:
    if not o.rl:
        unit = "pairs" if o.pairs else "sequences"
        yield o.entry(f"batch.{unit}", o["train_batch_size"], "train_batch_size")
        yield o.entry("run.epochs", float(o["max_epochs"]), "max_epochs")
        return
    prompts, responses = o["rollout_batch_size"], o["n_samples_per_prompt"]
    yield o.entry("batch.prompts", prompts, "rollout_batch_size")
    yield o.entry("batch.responses", responses, "n_samples_per_prompt")
    note = f"{prompts} * {responses} responses / {o['train_batch_size']}"
    flags = ("train_batch_size", "rollout_batch_size", "n_samples_per_prompt")
    yield o.entry("algorithm.mini_batches", _updates(o), *flags, note=note)
    yield o.entry("algorithm.epochs", o["max_epochs"], "max_epochs")
    yield o.entry("run.epochs", float(o["num_episodes"]), "num_episodes", note="of the prompts")
    generated = o["vllm_generate_batch_size"]
    if generated is not None and generated > prompts:
        yield from o.lacking("no more is sampled than is learned", "vllm_generate_batch_size")
    else:
        yield from o.idle("a step's prompts are asked for at once", "vllm_generate_batch_size")


def _updates(o: Options) -> int:
    """Optimizer steps of a step."""
    sampled, size = o["rollout_batch_size"] * o["n_samples_per_prompt"], o["train_batch_size"]
    if sampled % size == 0:
        return int(sampled // size)
    divisors = [n for n in range(1, sampled + 1) if sampled % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - size))
    raise ConfigError(
        f"{o.shown('train_batch_size')} does not divide the {sampled} responses of a step "
        f"({o.shown('rollout_batch_size')} {o.shown('n_samples_per_prompt')}), which are learned "
        f"in equal parts. Nearest: {o.names['train_batch_size']} {nearest}."
    )
