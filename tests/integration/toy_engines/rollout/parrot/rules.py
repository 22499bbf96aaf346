"""What the engine asks of a run."""

from __future__ import annotations

from plimsoll.spec.engine_rules import RolloutRules

RULES = RolloutRules(
    title="the parrot",
    where=("local",),
    package="transformers",
    packages=(),
    settings=lambda spec: iter(()),
    model=lambda spec, key, path: iter(()),
    files=lambda spec: iter(()),
    tools=lambda spec: iter(()),
    host=lambda spec, host: iter(()),
    start=lambda spec, device: iter(()),
    adapter_room=lambda spec: None,
)
