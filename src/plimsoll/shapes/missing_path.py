"""Explain why a path has no data or model, and what to write instead."""

from __future__ import annotations

import difflib
from pathlib import Path

from plimsoll.config.engine import ADAPTER_FILE


def missing_path(name: str, wanted: str) -> tuple[str, str] | None:
    """Return why nothing can be read at a path, and what to write instead; or None.

    None means that `name` may be a name on the hub. This holds for `organisation/name` if there is
    no local directory `organisation`, and for a single name if no local path is similar. `wanted`
    is the kind of path that is needed, such as `a model directory`.
    """
    path = Path(name)
    if path.exists():
        what = "It is a file." if path.is_file() else "It is neither a file nor a directory."
        return what, f"give the path of {wanted}"
    if path.is_symlink():
        return f"It is a link to {path.readlink()}, which is not there.", "mend the link"
    close = near_path(path)
    is_short = len(path.parts) <= 2 and path.parts[:1] not in ((".",), ("..",))
    is_name = is_short and not path.is_absolute() and not name.startswith((".", "~"))
    may_be_on_hub = is_name and (not close if len(path.parts) == 1 else not path.parent.is_dir())
    if may_be_on_hub and not path.suffix.startswith((".json", ".parquet", ".gz")):
        return None
    gone = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    why = f"There is no such file or directory: `{gone.name}` is not in {gone.parent.absolute()}."
    if close:
        return why, f"did you mean {close}?"
    return why, f"give the path of {wanted}, or a name on the hub"


def near_path(path: Path) -> Path | None:
    """Return the existing path that is most similar to `path`, folder by folder."""
    near = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (near / part).exists():
            siblings = sorted(sibling.name for sibling in near.iterdir()) if near.is_dir() else []
            close = difflib.get_close_matches(part, siblings, n=1)
            if not close:
                return None
            part = close[0]
        near /= part
    return near


def no_model(path: Path) -> tuple[str, str]:
    """Return why a directory without config.json is no model, and how to get a model from it.

    The second sentence begins in lower case and has no full stop.
    """
    if (path / ADAPTER_FILE).is_file():
        why = "It is an adapter alone, and a whole model is needed."
        return why, f"merge it first: plimsoll merge {path} --out DIRECTORY"
    for checkpoint in (path, path.parent):
        if (checkpoint / "state.json").is_file():
            why = f"{checkpoint} is a checkpoint, which holds no model in Hugging Face format."
            return why, f"write one: plimsoll export {checkpoint} --to DIRECTORY"
    why = "The directory has no config.json, so it is no model in Hugging Face format."
    inner = sorted(file.parent.name for file in path.glob("*/config.json"))
    if not inner and (path / "checkpoints").is_dir():
        return why, f"write the model of its run: plimsoll export {path} --to DIRECTORY"
    return why, f"did you mean {path / inner[-1]}?" if inner else "give a model directory"
