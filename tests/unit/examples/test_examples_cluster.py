"""Files for containers and clusters: they can be read, and what they call exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from plimsoll.config.rl import RlConfig

ROOT = Path(__file__).parents[3]
FILES = ROOT / "examples" / "cluster"
LOCK = (ROOT / "requirements" / "gpu.txt").read_text()


def test_the_image_has_what_it_copies_and_nothing_else() -> None:
    text = (FILES / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert copied and all((ROOT / name).exists() for name in copied)
    kept = (FILES / "Dockerfile.dockerignore").read_text()
    assert {*re.findall(r"^!(.*)$", kept, re.M)} == {*copied}


def test_the_compose_file_builds_that_image() -> None:
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    build = services["plimsoll"]["build"]
    context = (FILES / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]) == FILES / "Dockerfile"


def test_the_ray_job_has_the_locked_version_and_as_many_nodes_as_it_asks_for() -> None:
    spec = yaml.safe_load((FILES / "kuberay.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in LOCK
    workers = sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert f"--cluster.nodes {1 + workers} " in spec["entrypoint"]


def test_the_batch_script_is_one_of_bash() -> None:
    subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=True)


@pytest.mark.parametrize("name", ["slurm.sh", "kuberay.yaml"])
def test_the_keys_that_they_set_exist(name: str) -> None:
    keys = re.findall(r"--((?:cluster|run)\.\w+)", (FILES / name).read_text())
    assert len(keys) >= 4
    for key in keys:
        section, _, field = key.partition(".")
        settings = RlConfig.model_fields[section].annotation
        assert field in settings.model_fields, key  # type: ignore[union-attr]
