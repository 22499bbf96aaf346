"""The largest forward of a rank, and the weights on their way to the engines."""

from __future__ import annotations

from typing import Any

from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.spec.run_spec import RunSpec
from plimsoll.spec.workload import Workload


def micro_batch(work: Workload, ranks: int) -> MicroBatch:
    """The largest pack of a rank. Where prompts are shared, a response may be a token long, and its
    prompt almost all of a micro-batch."""
    tokens = work.largest_pack(ranks)
    sequences = -(-tokens // work.longest)
    learned = sequences if work.ends_only else tokens
    shared = tokens if work.shares_prompts else 0
    return MicroBatch(tokens, sequences, min(work.longest, tokens), learned, shared)


def bucket_bytes(spec: RunSpec[Any], shape: ModelShape) -> int:
    """Of the largest bucket of the actor's weights on its way to the engines: one tensor may be
    larger than a bucket is meant to be, and a tied head is sent beside the embedding. 0 without
    engines."""
    if spec.sampling is None:
        return 0
    element = spec.actor.model.element
    tied = element * shape.embedding_parameters if shape.tied else 0
    largest = element * shape.largest_parameter
    whole = element * shape.parameters
    return min(max(spec.sampling.rollout.sync.bucket_bytes, largest), whole) + tied
