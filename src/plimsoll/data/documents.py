"""A document of plain text as training samples."""

from __future__ import annotations

import numpy as np

from plimsoll.data.report import RowProblem
from plimsoll.records import Sample, TokenIds
from plimsoll.run.counting import counted


def cut_document(tokens: TokenIds, longest: int, field: str) -> tuple[Sample, ...]:
    """The samples of a document, none of more than `longest` tokens.

    Each begins with the last token of the one before it, so that every token but the document's
    first is learned, and none twice: with longest = 3, [a b c d] gives [a b c] and [c d].
    Raises RowProblem for the field where nothing can be learned.
    """
    if min(longest, len(tokens)) < 2:
        raise RowProblem(
            field, f"leaves no tokens to learn from within {counted(longest, 'token')}"
        )
    pieces = [tokens[i : i + longest] for i in range(0, len(tokens) - 1, longest - 1)]
    return tuple(Sample(piece, np.arange(len(piece)) > 0) for piece in pieces)
