"""An agent of Plimsoll that has player.py play an episode of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

from plimsoll.environment.agents import AgentResult


async def play(
    row: Mapping[str, Any], base_url: str, api_key: str, socket: str = "player.sock"
) -> AgentResult:
    """Have an episode played; return verifiers' score and metrics."""
    body = {"task": row["task"], "base_url": base_url, "api_key": api_key}
    answer = (await _player(socket).post("/play", json=body)).json()
    if "reward" not in answer:
        raise RuntimeError(answer["failed"])
    return AgentResult(answer["reward"], answer["figures"])


@cache
def _player(socket: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits)
    return httpx.AsyncClient(base_url="http://player", transport=transport, timeout=None)
