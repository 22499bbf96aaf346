"""Convert a command of verl to a config."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.interop.convert.foreign import ForeignRun
from plimsoll.interop.convert.launch import Launch
from plimsoll.interop.convert.options import Options
from plimsoll.interop.convert.verl import data, learning, roles
from plimsoll.interop.convert.verl.arguments import read_options
from plimsoll.interop.convert.writer import Converted, write_config

_VERSION = "0.9.1"


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return the config that means what a command means.

    Args:
        launch: The command.
        cards: Cards of a machine, if the command does not say it.

    Raises:
        ConfigError: Values cannot be read, Plimsoll cannot do what they say, or the config is
            wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = read_options(launch, cards)
    run = _run(o)
    remarks = [*roles.remarks(o), *data.remarks(o), *learning.remarks(o)]
    about = f"verl {_VERSION}, {launch.program}"
    return write_config(learning.job(o), run, o, remarks, about)


def _run(o: Options) -> ForeignRun:
    rollout = roles.rollout(o)
    return ForeignRun(
        machines=roles.machines(o),
        actor=roles.actor(o),
        critic=roles.critic(o),
        reference=roles.reference(o),
        reward_model=learning.reward_model(o),
        rewards=learning.rewards(o),
        data=data.data(o),
        batch=data.batch(o),
        rollout=rollout and replace(rollout, eval_sampling=data.eval_sampling(o)),
        algorithm=learning.algorithm(o),
        run=data.run(o),
    )
