"""Give this Python process the card made of host memory, as soon as it imports torch.

Python imports this file when it starts, if PYTHONPATH names the folder; child processes do so, too.
"""

import sys
from pathlib import Path

_CARD = Path(__file__).parents[1]
sys.path.insert(0, str(_CARD.parent))  # its NVML is taken before the installed one
sys.path.append(str(_CARD))

from fakecard.start import give_card  # noqa: E402

give_card()
