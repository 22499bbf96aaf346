"""Ray's authentication token where a run starts a Ray, and where it joins one with and without."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from choice import slow
from commands import wait_for
from listeners import listening
from ray.cluster_utils import Cluster

from plimsoll.cluster.ray_access import check_reachable, private_folder, ray_folder
from plimsoll.cluster.ray_start import start_ray
from plimsoll.config.cluster import ClusterConfig
from plimsoll.errors import ConfigError

pytestmark = pytest.mark.engine


@pytest.fixture(params=[slow("disabled"), slow("token")])
def head(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """Mode and address of a cluster, on a machine whose ~/.ray has a token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("a" * 64)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
    command += ["--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "1"]
    command += ["--include-dashboard", "false", "--disable-usage-stats"]
    environment = os.environ | {"RAY_AUTH_MODE": request.param}
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=nowhere, stderr=nowhere)
    address = f"127.0.0.1:{port}"

    def answers() -> bool:
        try:
            check_reachable(address)
        except OSError:
            return False
        return True

    try:
        wait_for(answers, "Ray's head")
        yield request.param, address
    finally:
        process.terminate()
        process.wait(60)


def test_a_cluster_gets_the_token_if_it_asks_for_one(
    head: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also after a Ray of this process's own, whose token was another."""
    mode, address = head
    for config in (ClusterConfig(), ClusterConfig(address=address), ClusterConfig()):
        start_ray(config)
        try:
            assert ray.get(ray.remote(lambda: 2).remote(), timeout=60) == 2
        finally:
            ray.shutdown()
        assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(os.environ)
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    if mode == "token":
        with pytest.raises(ConfigError, match="no authentication token was found"):
            start_ray(ClusterConfig(address=address))
    Cluster().shutdown()  # it would end the process if a token were still to be sent
    assert capfd.readouterr().err == ""


def test_a_ray_that_a_run_starts_is_reached_from_this_machine_with_its_token_alone() -> None:
    before = listening()
    start_ray(ClusterConfig())
    try:
        assert ray.get(ray.remote(lambda: 2).remote(), timeout=60) == 2
        of_ray = listening() - before
        address = ray.get_runtime_context().gcs_address
        session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
        assert session.parent == ray_folder() and (session / "sockets" / "raylet").is_socket()
        assert private_folder().stat().st_mode & 0o777 == 0o700
        ask = f"GcsClient(address={address!r}).internal_kv_keys(b'', None)"
        words = [sys.executable, "-c", f"from ray._raylet import GcsClient; {ask}"]
        answers = [
            subprocess.run(words, env=os.environ | mode, capture_output=True, text=True)
            for mode in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a" * 64})
        ]
    finally:
        ray.shutdown()
    assert all(a.returncode == 1 and "AuthenticationError" in a.stderr for a in answers), answers
    assert len(of_ray) > 3 and {address for address, _ in of_ray} == {"127.0.0.1"}
