"""What PPO needs before its first step: prompts, processes, models."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster, thread_count
from plimsoll.config.engine import FrozenRole
from plimsoll.config.jobs import PpoConfig
from plimsoll.data.dataset import load_prompts
from plimsoll.engine.process_group import choose_device
from plimsoll.engine.worker import Role, Worker
from plimsoll.errors import ConfigError
from plimsoll.recipes.session import Session, load_data
from plimsoll.records import Prompt
from plimsoll.rollout.protocol import EngineSpec

ROLES: tuple[Role, ...] = ("actor", "critic")
"""The roles that learn, and so are in checkpoints."""


@dataclass(frozen=True)
class PpoData:
    """The prompts to learn on, and those held out."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]


def load_prompt_data(session: Session, config: PpoConfig) -> PpoData:
    """The prompts of both sources; at least as many to learn on as a step needs."""
    data = PpoData(*load_data(session, load_prompts))
    if len(data.train) < config.batch.prompts:
        raise ConfigError(
            f"batch.prompts is {config.batch.prompts}, but data.train has only {len(data.train)} "
            f"usable prompts; one step would hold a prompt twice. Lower batch.prompts, or bring "
            f"more data"
        )
    return data


def start(config: PpoConfig, data: PpoData) -> Cluster:
    """Start ranks and engines."""
    longest = max(len(p.tokens) for p in (*data.train, *data.eval))
    new = max(
        s.max_new_tokens for s in (config.rollout.sampling, config.eval_sampling) if s is not None
    )
    device = choose_device(config.cluster.device)
    specs = [
        EngineSpec(
            index=i,
            model=config.actor.model.path,
            max_tokens=longest + new,
            threads=thread_count(config.cluster, config.rollout.engines),
            device=device,
            rollout=config.rollout,
            trust_remote_code=config.actor.model.trust_remote_code,
        )
        for i in range(config.rollout.engines)
    ]
    return start_cluster(config.cluster, specs)


def load_roles(cluster: Cluster, config: PpoConfig) -> None:
    """Load actor, critic and, when a KL is asked for, the reference on all ranks."""
    temperature = config.rollout.sampling.temperature
    cluster.all(Worker.load_policy, "actor", config.actor, temperature)
    cluster.all(Worker.load_value, "critic", config.critic, config.run.seed)
    if config.algorithm.kl.place != "none":
        reference = config.reference or FrozenRole(model=config.actor.model)
        cluster.all(Worker.load_policy, "reference", reference, temperature)
