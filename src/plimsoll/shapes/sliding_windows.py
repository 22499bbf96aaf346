"""How many of a model's layers attend to a sliding window only, by the rule of its family.

Each is asked only where config.json gives a window, and follows
models/<family>/configuration_<family>.py of transformers.
"""

from __future__ import annotations

from plimsoll.shapes.config_fields import COUNT, Fields


def nowhere(fields: Fields, layers: int) -> int:
    """Attention is full, whatever the file says."""
    return 0


def everywhere(fields: Fields, layers: int) -> int:
    """In every layer."""
    return layers


def if_used(fields: Fields, layers: int) -> int:
    """In every layer, or none."""
    return layers if fields.flag("use_sliding_window") else 0


def on_top(fields: Fields, layers: int) -> int:
    """In the layers above the first max_window_layers."""
    if not fields.flag("use_sliding_window"):
        return 0
    full = fields.size("max_window_layers", COUNT, least=0)
    return _by_type(fields, max(0, layers - full))


def every_second_below(fields: Fields, layers: int) -> int:
    """In every second of the first max_window_layers."""
    if not fields.flag("use_sliding_window"):
        return 0
    below = min(layers, fields.size("max_window_layers", COUNT, least=0))
    return _by_type(fields, (below + 1) // 2)


def every_second(fields: Fields, layers: int) -> int:
    """In the first layer, the third, and so on."""
    return _by_type(fields, (layers + 1) // 2)


def but_every_nth(fields: Fields, layers: int) -> int:
    """In all but each layer that ends a pattern."""
    pattern = fields.size("sliding_window_pattern", COUNT)
    return _by_type(fields, layers - layers // pattern)


def _by_type(fields: Fields, otherwise: int) -> int:
    types = fields.list_or_none("layer_types")
    return otherwise if types is None else types.count("sliding_attention")
