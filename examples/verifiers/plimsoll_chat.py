"""A harness for verifiers that runs in the process of player.py.

The policy is asked for turns until it calls no tool. Its calls go to the task's tool servers.
verifiers' harness `null` does the same in a separate program. That program starts for each part of
a rollout, and takes seconds to import its libraries.
"""

from __future__ import annotations

import json
import ssl
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["PlimsollChat"]

ChatMessage = dict[str, Any]


class PlimsollChat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A harness without a separate program; the conversation is in the trace."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run one part of a rollout, until a reply has no tool call; return exit code and error."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=endpoint,
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=None,
                    verify=_tls(),
                )
            )
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            messages = self._first_messages(data)
            while True:
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(
                    "chat/completions", json=body | ({"tools": tools} if tools else {})
                )
                if answer.is_error:
                    return vf.ProgramResult(1, "", answer.text)
                reply = answer.json()["choices"][0]["message"]
                messages = [*messages, {k: v for k, v in reply.items() if v is not None}]
                calls = reply.get("tool_calls") or ()
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    function = call["function"]
                    content = await _call_tool(function, connections, dispatch)
                    result = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
                    messages.append(bound_tool_message({**result, "content": content}))

    def _first_messages(self, data: vf.TaskData) -> list[ChatMessage]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or ())]


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that all rollouts share; a new context takes 40 ms and 1 MB."""
    return ssl.create_default_context()


async def _call_tool(
    function: dict[str, str], connections: dict[str, Any], dispatch: dict[str, tuple[str, str]]
) -> Any:
    """Return a tool's result, or an error text if the call is wrong."""
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(connections, dispatch, function["name"], arguments)
