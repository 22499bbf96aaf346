"""What tests of vLLM's engine share."""

from __future__ import annotations

from plimsoll.rollout.protocol import EngineSpec
from plimsoll.rollout.vllm import VllmEngine


async def made(spec: EngineSpec) -> VllmEngine:
    """An engine within the loop that it answers in, as in its actor."""
    return VllmEngine(spec)
