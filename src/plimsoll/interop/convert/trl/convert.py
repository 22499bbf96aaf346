"""Convert a command of TRL to a config."""

from __future__ import annotations

from plimsoll.interop.convert.foreign import ForeignRun
from plimsoll.interop.convert.launch import Launch
from plimsoll.interop.convert.options import Options
from plimsoll.interop.convert.trl import data, learning, roles
from plimsoll.interop.convert.trl.arguments import read_options
from plimsoll.interop.convert.writer import Converted, write_config

_VERSION = "1.16"


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return the config that means what a command means.

    Args:
        launch: The command.
        cards: Cards of a machine, if the command does not say it.

    Raises:
        ConfigError: Values or files cannot be read, Plimsoll cannot do what they say, or the config
            is wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = read_options(launch, cards)
    run = _run(o)
    remarks = [*roles.remarks(o), *data.remarks(o), *learning.remarks(o)]
    about = f"TRL {_VERSION}, trl {o.command}"
    return write_config(learning.job(o), run, o, remarks, about)


def _run(o: Options) -> ForeignRun:
    return ForeignRun(
        machines=roles.machines(o),
        actor=roles.actor(o),
        reference=roles.reference(o),
        teacher=learning.teacher(o),
        reward_model=learning.reward_model(o),
        rewards=learning.rewards(o),
        data=data.data(o),
        batch=data.batch(o),
        rollout=roles.rollout(o),
        algorithm=learning.algorithm(o),
        run=data.run(o),
    )
