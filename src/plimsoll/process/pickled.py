"""Messages as pickles, which may hold any object: only for children that run the user's own code,
which may do here what it may do there. A policy's programs never answer in pickles."""

from __future__ import annotations

import pickle

from plimsoll.process.frames import Codec

PICKLE = Codec(pickle.dumps, pickle.loads)
