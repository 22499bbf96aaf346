"""What tests of vLLM's engine share."""

from __future__ import annotations

import gc
import os
import weakref
from asyncio import Runner
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.engine import VllmEngine, environment


@contextmanager
def started(spec: EngineSpec) -> Iterator[tuple[VllmEngine, Runner]]:
    """An engine in this process, and the loop that it answers in, as in its actor; once it is
    stopped, nothing of it is left. Tests may ask its workers what they like, by functions."""
    own = environment(spec) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with patch.dict(os.environ, own), Runner() as loop:
        engine = loop.run(_made(spec))
        llm, sockets = weakref.ref(engine._llm), Path(engine._sockets.name)
        assert sockets.is_dir()
        yield engine, loop
        loop.run(engine.stop())
    gc.collect()  # errors of its own hold it in cycles
    assert llm() is None and not sockets.exists()


async def _made(spec: EngineSpec) -> VllmEngine:
    return VllmEngine(spec)
