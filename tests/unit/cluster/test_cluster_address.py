"""Addresses at which no Ray cluster is."""

from __future__ import annotations

import pytest

from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.engine.process_group import free_port
from plimsoll.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense", "127.0.0.1:x"])
def test_a_wrong_address_is_refused_at_once(address: str) -> None:
    address = address.format(port=free_port())
    with pytest.raises(ConfigError) as caught:
        RayCluster(ClusterConfig(address=address), (), threads=1)
    assert str(caught.value).startswith(f"cluster.address: no Ray cluster answers at {address!r}")
