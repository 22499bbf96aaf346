"""The memory of the engine on `generate` of transformers."""

from __future__ import annotations

from functools import partial

from plimsoll.sampler.price import RolloutPrice, grown_contents

_SOURCE = "sampler/transformers/engine.py: generate of transformers with its DynamicCache"

PRICE = RolloutPrice(contents=partial(grown_contents, source=_SOURCE))
