"""From a rule of the config to what scores: threads, processes or clients, held until the end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx

from plimsoll.machine.host import usable_cores
from plimsoll.reward.functions.calls import Here, Setup, is_coroutine, takes_many
from plimsoll.reward.functions.processes import ProcessPool
from plimsoll.reward.price import MOST_PROCESSES
from plimsoll.reward.references import processes_asked
from plimsoll.reward.rule import Rule
from plimsoll.reward.servers.http import Servers
from plimsoll.reward.servers.judge import Judge
from plimsoll.reward.source import Call, Source

_FUNCTION_WAIT = 0.1
_SERVER_WAIT = 0.5
_COROUTINES = 64


async def open_source(rule: Rule, stack: AsyncExitStack) -> Source:
    """What scores a rule. To be asked in the event loop that it will work in; what it holds is let
    go by the stack."""
    config = rule.config
    if config.http is not None:
        client = await stack.enter_async_context(_client())
        servers = Servers.of(config.http, client)
        return Source(servers, config.http.batch, config.http.retries, _SERVER_WAIT)
    if config.judge is not None:
        client = await stack.enter_async_context(_client())
        return Source(Judge.of(config.judge, client), 1, config.judge.retries, _SERVER_WAIT)
    assert rule.function is not None
    batch = takes_many(rule.function) if config.batch is None else config.batch
    call = await _function_call(rule, rule.function, batch, stack)
    return Source(call, None if batch else 1, config.retries, _FUNCTION_WAIT)


async def _function_call(
    rule: Rule, function: partial[Any], batch: bool, stack: AsyncExitStack
) -> Call:
    config, cores = rule.config, min(usable_cores(), MOST_PROCESSES)
    if config.process:
        memory = None if config.memory_gib is None else int(config.memory_gib * 1024**3)
        setup = Setup(config.name, config.options, batch, memory)
        pool = ProcessPool(setup, config.time_limit, config.at_once or cores)
        stack.push_async_callback(pool.close)
        return pool
    coroutine = is_coroutine(function)
    threads = cores if processes_asked(function) else 1
    places = asyncio.Semaphore(config.at_once or (_COROUTINES if coroutine else threads))
    return Here(function, batch, coroutine, config.time_limit, places)


def _client() -> httpx.AsyncClient:
    """Without bounds of its own: `at_once` and `time_limit` are the config's."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
