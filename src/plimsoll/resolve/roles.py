"""The roles of a run: each is a model with its work, such as learning or scoring.

The jobs declare them (jobs/roles.py). All other code asks a role what it takes part in, and never
for its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.cluster import MAIN_RANKS, RankKind
from plimsoll.config.engine import FrozenRole, ModelConfig, TrainedRole

RoleName = str
"""Name of a role: its kind (`reward`), or kind and instance (`reward.helpful`) of several."""

HeadKind = Literal["policy", "value", "states"]
"""The output for a token: log-probs (policy), one number (value), or hidden states (states)."""

TrainPhase = Literal["train_critic", "train_actor"]


@dataclass(frozen=True)
class Role:
    """A model with work to do in a run, and what it takes part in.

    Attributes:
        name: the name of the role in plans, metrics, messages and checkpoints.
        settings: the settings of a role that learns, or of a role that only scores.
        head: the output for a token.
        key: the role's section in the config.
        trains: the phase in which it learns; None for a role that only scores.
        sends: whether its weights leave the ranks: for the engines that sample, and as the final
            model. At most one role of a run does.
        group: the group of ranks that it is for; without ranks of this group, the main ones.
        scores: whether it does a forward pass without gradients in each step of the run.
        column: the name of the column that its forward pass computes (records.py); "" for none.
        part: the part of the reward that it gives; "" for none.
        teaches: whether another role learns its distributions, so that both need the same tokens.
        given: whether the config has its section. A role without one is the sender as it began.
        early: whether it scores all rows before the others are loaded, and is removed then.
        without_adapter: whether it is the sender's model with the adapter switched off, so that it
            holds no weights.
        begins: the number of steps of the run before it learns.
        order: its place in the order in which roles are loaded, which is that of the job's list.
    """

    name: RoleName
    settings: TrainedRole | FrozenRole
    head: HeadKind
    key: str
    trains: TrainPhase | None = None
    sends: bool = False
    group: RankKind = MAIN_RANKS
    scores: bool = True
    column: str = ""
    part: str = ""
    teaches: bool = False
    given: bool = True
    early: bool = False
    without_adapter: bool = False
    begins: int = 0
    order: int = 0

    @property
    def trained(self) -> TrainedRole | None:
        """The settings of a role that learns; None for one that only scores."""
        return self.settings if isinstance(self.settings, TrainedRole) else None

    @property
    def frozen(self) -> FrozenRole | None:
        """The settings of a role that only scores and has its own weights; None for others."""
        if self.without_adapter or not isinstance(self.settings, FrozenRole):
            return None
        return self.settings

    @property
    def model(self) -> ModelConfig:
        """The model of the role."""
        return self.settings.model

    @property
    def compares(self) -> bool:
        """Whether its log-probs or distributions are compared with those of a role that learns."""
        return self.trained is None and self.head != "value"

    @property
    def scoring_phase(self) -> Literal["precompute", "score"]:
        """The phase of its forward passes without gradients."""
        return "precompute" if self.early else "score"
