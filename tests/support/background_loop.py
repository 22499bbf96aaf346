"""An event loop in a thread of its own, as a run has one for its coroutines."""

from __future__ import annotations

import asyncio
from threading import Thread

LOOP = asyncio.new_event_loop()
Thread(target=LOOP.run_forever, name="loop of tests", daemon=True).start()
