"""What a directory is that is given as a model and is none."""

from __future__ import annotations

from pathlib import Path

from plimsoll.config.adapter import ADAPTER_FILE


def no_model(path: Path) -> tuple[str, str]:
    """What a directory without config.json is, and how a model is made of it; two sentences, of
    which the second begins in lower case and has no full stop."""
    if (path / ADAPTER_FILE).is_file():
        why = "It is an adapter alone, and a whole model is needed."
        return why, f"merge it first: plimsoll merge {path} --out DIRECTORY"
    for checkpoint in (path, path.parent):
        if (checkpoint / "state.json").is_file():
            why = f"{checkpoint} is a checkpoint, which holds no model in Hugging Face format."
            return why, f"write one: plimsoll export {checkpoint} --to DIRECTORY"
    why = "The directory has no config.json, so it is no model in Hugging Face format."
    inner = sorted(found.parent.name for found in path.glob("*/config.json"))
    if not inner and (path / "checkpoints").is_dir():
        return why, f"write the model of its run: plimsoll export {path} --to DIRECTORY"
    return why, f"did you mean {path / inner[-1]}?" if inner else "give a model directory"
