"""What a path is that should be of data or of a model here, and is of neither; and what a directory
is that is given as a model and is none."""

from __future__ import annotations

import difflib
from pathlib import Path

from plimsoll.config.engine import ADAPTER_FILE


def missing_path(name: str, wanted: str) -> tuple[str, str] | None:
    """Why nothing can be read there, and what to write instead; None where it may well be a name on
    the hub: `organisation/name` without such a directory here, or a single name with nothing like
    it here. wanted: such as `a model directory`.
    """
    path = Path(name)
    if path.exists():
        what = "It is a file." if path.is_file() else "It is neither a file nor a directory."
        return what, f"give the path of {wanted}"
    if path.is_symlink():
        return f"It is a link to {path.readlink()}, which is not there.", "mend the link"
    close = near_path(path)
    simple = len(path.parts) <= 2 and path.parts[:1] not in ((".",), ("..",))
    by_name = simple and not path.is_absolute() and not name.startswith((".", "~"))
    on_hub = by_name and (not close if len(path.parts) == 1 else not path.parent.is_dir())
    if on_hub and not path.suffix.startswith((".json", ".parquet", ".gz")):
        return None
    gone = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    near = f"did you mean {close}?" if close else f"give the path of {wanted}, or a name on the hub"
    why = f"There is no such file or directory: `{gone.name}` is not in {gone.parent.absolute()}."
    return why, near


def near_path(path: Path) -> Path | None:
    """What is here and called most like `path`, folder by folder."""
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (found / part).exists():
            siblings = sorted(sibling.name for sibling in found.iterdir()) if found.is_dir() else []
            close = difflib.get_close_matches(part, siblings, n=1)
            if not close:
                return None
            part = close[0]
        found /= part
    return found


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
