"""Name the reasons why settings of other trainers have no counterpart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RemarkKind = Literal["same", "idle", "lacking", "unknown", "check"]


@dataclass(frozen=True)
class Absence:
    """The reason why a setting has no counterpart.

    Attributes:
        kind: Kind of the remark.
        why: The reason.
        refused: Whether a command with the setting is refused, as the run would differ without it.
        harmless: Values that have no effect, and so are accepted.
    """

    kind: RemarkKind
    why: str
    refused: bool = False
    harmless: tuple[object, ...] = (None, False)

    def unless(self, *harmless: object) -> Absence:
        """Return a copy of the reason with these harmless values."""
        return replace(self, harmless=harmless)


PACKED = Absence("same", "sequences are always packed, without padding")
KERNELS = Absence("same", "PyTorch's kernels read packed sequences, and logits come in chunks")
RECORDED = Absence("same", "metrics, seconds and samples are always in the run directory")
ALWAYS = Absence("same", "Plimsoll always does this")

LAUNCHED = Absence("idle", "Plimsoll starts ranks, engines and Ray itself")
ENGINE = Absence("idle", "DeepSpeed, vLLM or PyTorch decides this by itself")
READ_ONCE = Absence("idle", "rows are read and templated before the first step")
SCORED = Absence("idle", "scoring, the critic and evaluation use the packs of training")
CHECKPOINTS = Absence("idle", "checkpoints are in run.directory, and a run resumes from each")
NAMED = Absence("idle", "a run is named after its directory; W&B reads its own variables")
OTHER_METHOD = Absence("idle", "it belongs to a method that is not used")
FILE_READ = Absence("idle", "the file that it names is read")
UNASKED = Absence("idle", "Plimsoll does not need it")

MODEL_FILES = Absence("lacking", "models and tokenizers are loaded as their files say")
ONE_CARD = Absence("lacking", "a sequence is on one card, and ZeRO alone divides trained models")
SAMPLING = Absence("lacking", "sampling has the settings of rollout.sampling alone")
TEMPLATE = Absence("lacking", "a template has no options: write them into data.chat_template")
ROWS = Absence("lacking", "rows are read by their columns: prepare them in a file")
UPLOADS = Absence("lacking", "nothing is uploaded: `plimsoll export` writes a model to upload")
SYNCHRONOUS = Absence(
    "lacking",
    "it is converted to take turns; rollout.staleness: 1 samples while the ranks train, with cards "
    "for the engines and a correction",
)
METHOD = Absence("lacking", "Plimsoll has no such method")
NO_METHOD = Absence("lacking", "Plimsoll has no such method", refused=True)
ADAMW = Absence("lacking", "weights are trained by AdamW", refused=True)
TEXT_ONLY = Absence("lacking", "images, video and sound cannot be read", refused=True)
TOOLS = Absence("lacking", "turns and tools are given by `environments`", refused=True)
