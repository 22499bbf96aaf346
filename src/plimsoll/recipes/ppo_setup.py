"""What PPO needs before its first step: prompts, processes, models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from plimsoll.cluster.device import run_device
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.route import ActorRoute, AdapterRoute
from plimsoll.cluster.start import start_cluster, thread_count
from plimsoll.config.agree_adapters import room_for_rank
from plimsoll.config.counting import counted
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.jobs import PpoConfig, RlJobConfig
from plimsoll.data.dataset import load_prompts
from plimsoll.data.loading import Loaded, Seen
from plimsoll.data.order import Portion
from plimsoll.data.template import Template
from plimsoll.engine.worker import Worker
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.memory.price.work import largest_pack
from plimsoll.recipes.judging import load_judge
from plimsoll.recipes.roles import load_reference
from plimsoll.recipes.run_data import LoadRows, RunData, load_data
from plimsoll.recipes.sampling import probe_sequences
from plimsoll.recipes.session import Session
from plimsoll.records import Prompt
from plimsoll.rollout.protocol import EngineSpec
from plimsoll.rollout.sync import WeightRoute, WeightSync, prepare_sync
from plimsoll.rollout.text import check_turn_end

PpoData = RunData[Prompt]


def load_prompt_data(
    session: Session, config: RlJobConfig, check_reference: Callable[[str], object]
) -> PpoData:
    """The prompts of both sources; at least as many to learn on as a step needs, with references
    that pass the check, and with a template whose end of turn ends a response."""

    def check(reference: str) -> None:
        session.stop_if_asked(session.state.step)  # thousands may take a minute
        check_reference(reference)

    data = load_data(session, prompt_loader(config, check))
    if len(data.order.portions) > 1:  # each source numbers its rows from 0
        data = replace(data, train=tuple(replace(p, index=i) for i, p in enumerate(data.train)))
    for portion in data.order.portions:
        _check_enough(portion, config.batch.prompts * data.order.share(portion), config)
    return data


def prompt_loader(
    config: RlJobConfig, check_reference: Callable[[str], object]
) -> LoadRows[Prompt]:
    """Reads prompts, of a template whose end of turn ends a response. check_reference: as
    `load_prompts` takes it."""

    def load(
        data: DataConfig, source: SourceConfig, template: Template, seen: Seen
    ) -> Loaded[Prompt]:
        check_turn_end(template, config.actor.model, config.rollout.sampling)
        return load_prompts(data, source, template, seen, check_reference)

    return load


def _check_enough(portion: Portion, drawn: float, config: RlJobConfig) -> None:
    """drawn: the prompts of a source in a step."""
    if portion.rows < drawn:
        raise ConfigError(
            f"batch.prompts is {config.batch.prompts}, but {portion.key} has only "
            f"{counted(portion.rows, 'usable prompt')}; one step would hold a prompt twice. Lower "
            f"batch.prompts{' or the weight' if portion.name else ''}, or bring more data"
        )


def start(config: RlJobConfig, prompts: Iterable[Prompt]) -> Cluster:
    """Start ranks and engines. prompts: all that are to be answered."""
    longest = max(2, *(len(prompt.tokens) for prompt in prompts))  # 2: the shortest probe
    new = max(
        s.max_new_tokens for s in (config.rollout.sampling, config.eval_sampling) if s is not None
    )
    device = run_device(config.cluster)
    if device == "cpu" and config.rollout.sleep_level > 0:
        raise SettingsConflict(
            f"rollout.sleep_level is {config.rollout.sleep_level}, and this run is on CPU "
            f"(cluster.device: {config.cluster.device}): vLLM can sleep on GPUs only, and would go "
            f"on without. Write rollout.sleep_level: 0"
        )
    specs = [
        EngineSpec(
            index=i,
            model=config.actor.model.path,
            max_tokens=longest + new,
            threads=thread_count(config.cluster, config.rollout.engines),
            device=device,
            rollout=config.rollout,
            trust_remote_code=config.actor.model.trust_remote_code,
            adapter_rank=room_for_rank(config),
        )
        for i in range(config.rollout.engines)
    ]
    return start_cluster(config.cluster, specs)


def first_sync(cluster: Cluster, config: RlJobConfig, data: PpoData) -> WeightSync:
    """How weights reach the engines, once the first ones are seen to be the same there."""
    merged = config.actor.adapter is not None and config.rollout.sync.adapter == "merged"
    return prepare_sync(
        _actor_route(cluster, config),
        config.rollout.sync,
        probe_sequences(data.train, config),
        send_first=config.actor.model.quantization != "none",
        merged_in_bfloat16=merged and config.rollout.dtype == "bfloat16",
    )


def _actor_route(cluster: Cluster, config: RlJobConfig) -> WeightRoute:
    """The way of the actor's weights, or of its adapter alone, to the engines."""
    whole = ActorRoute(
        cluster, largest_pack(config, cluster.ranks), as_published=config.rollout.engine == "vllm"
    )
    return AdapterRoute(cluster, whole) if config.rollout.sync.adapter == "separate" else whole


def load_roles(cluster: Cluster, config: PpoConfig) -> None:
    """Load actor, critic and, where they are asked for, reward model and reference."""
    temperature = config.rollout.sampling.temperature
    cluster.all(Worker.load_policy, "actor", config.actor, temperature, config.run.seed)
    cluster.critics.all(Worker.load_value, "critic", config.critic, config.run.seed)
    load_judge(cluster, config)
    if config.algorithm.kl.place != "none":
        load_reference(cluster, config.reference, config.actor, temperature)


def make_room(cluster: Cluster, config: RlJobConfig) -> None:
    """Before engines wake on cards that they share with the ranks: have the ranks give back what
    their allocators only keep for later."""
    if config.rollout.placement == "shared":
        cluster.all(Worker.give_back)
        if cluster.critics is not cluster:
            cluster.critics.all(Worker.give_back)
