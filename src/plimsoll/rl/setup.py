"""Prepare a run of RL before its first step: prompts, processes, models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from plimsoll.cluster.protocol import Cluster, on_all_ranks
from plimsoll.cluster.route import ActorRoute, AdapterRoute
from plimsoll.cluster.start import start_cluster, thread_count
from plimsoll.config.cluster import device_of
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.config.engine import AdapterConfig
from plimsoll.config.files import nearest
from plimsoll.config.problems import refuse
from plimsoll.config.rl import RlConfig
from plimsoll.data.dataset import load_prompts
from plimsoll.data.fields import ReferenceCheck
from plimsoll.data.loading import Loaded, Observer, source_key
from plimsoll.data.order import Ascending, MixedOrder, Portion
from plimsoll.data.stored import JoinedRows, column_of, number_prompt, token_counts
from plimsoll.data.template import Template
from plimsoll.errors import ConfigError
from plimsoll.model.disturbance import ROUNDING
from plimsoll.records import Prompt
from plimsoll.resolve.engine_rules import rollout_rules
from plimsoll.resolve.job import SOURCE, source_in
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.sampling import probe_sequences
from plimsoll.run.numbers import plural
from plimsoll.sampler.protocol import EngineSpec, RolloutEngine
from plimsoll.sampler.text import check_turn_end
from plimsoll.sync.proof import WeightRoute, WeightSync, prepare_sync
from plimsoll.train.from_data import Work
from plimsoll.train.run_data import LoadRows, RunData, load_data
from plimsoll.train.session import RunSession
from plimsoll.trainer.worker import Worker

RlData = RunData[Prompt]
RlWork = Work[RlConfig, Prompt]


def load_prompt_data(
    session: RunSession, spec: RunSpec[RlConfig], references: ReferenceCheck | None = None
) -> RlData:
    """Return the prompts of all sources, to learn on and held out.

    Raises ConfigError if a reference answer is refused by its check, if a step needs more prompts
    than there are, or if the template's end of turn does not end a response.
    """

    def check(reference: object) -> None:
        session.stop_if_asked(session.state.step)  # thousands may take a minute
        assert references is not None
        references.check(reference)

    interrupted = None if references is None else replace(references, check=check)
    data = load_data(session, prompt_loader(spec, interrupted))
    data = replace(data, order=_order_portions(data.order, data.train))
    if len(data.order.portions) > 1:  # each source numbers its rows from 0
        data = replace(data, train=JoinedRows([data.train], number_prompt))
    _check_best(spec, data.held_out)
    for portion in data.order.portions:
        _check_enough(portion, spec.config.batch.prompts * data.order.share(portion), spec)
    return data


def _check_best(spec: RunSpec[RlConfig], held_out: Mapping[str, Sequence[Prompt]]) -> None:
    best = spec.run.best
    name = None if best is None else spec.evaluation.reports(best.metric)
    if best is None or name is None or (source := source_in(name, best.metric)) is None:
        return
    for eval_set in spec.eval_sets:
        there = {prompt.source for prompt in held_out[eval_set.key]}
        if name.startswith(f"eval/{eval_set.prefix}{SOURCE}/") and source not in there:
            raise ConfigError(
                f"run.best.metric: {best.metric}: no row of {eval_set.key} is of the source "
                f"{source!r}.{nearest(source, there)} There are: {', '.join(sorted(there))}."
            )


def _order_portions(order: MixedOrder, prompts: Sequence[Prompt]) -> MixedOrder:
    """Return the order in which sources with `order_by` numbers are drawn by these, ascending."""
    portions, first, levels = [], 0, column_of(prompts, "order_by")
    for portion in order.portions:
        numbers = levels[first : first + portion.rows]
        by = None if np.isnan(numbers).any() else Ascending(numbers)
        portions.append(replace(portion, by=by))
        first += portion.rows
    return replace(order, portions=tuple(portions))


def prompt_loader(
    spec: RunSpec[RlConfig], references: ReferenceCheck | None = None
) -> LoadRows[Prompt]:
    """Return the function that reads prompts; it refuses a template whose turns end no response."""
    samplings = {eval_set.key: eval_set.sampling for eval_set in spec.eval_sets}

    def load(
        data: DataConfig, source: SourceConfig, template: Template, observer: Observer
    ) -> Loaded[Prompt]:
        check_turn_end(template, spec.actor.model, spec.config.rollout.sampling)
        sampling = samplings.get(source_key(data, source), spec.config.rollout.sampling)
        known = spec.config.environments
        return load_prompts(data, source, template, observer, references, sampling, known)

    return load


def _check_enough(portion: Portion, drawn: float, spec: RunSpec[RlConfig]) -> None:
    if portion.rows < drawn:
        raise ConfigError(
            f"batch.prompts is {spec.config.batch.prompts}, but {portion.key} has only "
            f"{plural(portion.rows, 'usable prompt')}; one step would hold a prompt twice. Lower "
            f"batch.prompts{' or the weight' if portion.name else ''}, or bring more data"
        )


def start(spec: RunSpec[RlConfig], prompts: Sequence[Prompt]) -> Cluster:
    """Start the ranks and, if the run samples, engines that take the longest of these prompts."""
    if spec.engines is None:
        return start_cluster(spec.cluster, ())
    longest, rollout = longest_sequence(spec, prompts), spec.config.rollout
    device = device_of(spec.cluster)
    rules = rollout_rules(spec.engines)
    refuse(rules.start(spec, device))
    specs = [
        EngineSpec(
            index=i,
            model=spec.actor.model.path,
            max_tokens=longest,
            threads=thread_count(spec.cluster, rollout.engines),
            device=device,
            rollout=rollout,
            trust_remote_code=spec.actor.model.trust_remote_code,
            adapter_rank=rules.adapter_room(spec),
            adapter_targets=(spec.actor.adapter or AdapterConfig()).targets,
        )
        for i in range(rollout.engines)
    ]
    return start_cluster(spec.cluster, specs)


def longest_sequence(spec: RunSpec[RlConfig], prompts: Sequence[Prompt]) -> int:
    """Return the most tokens of a prompt with its response, which engines must take.

    With environments, a prompt may have up to data.max_tokens: it also holds the text of the
    environment's `reset` and its tools.
    """
    assert spec.sampling is not None, "asked of a run that samples"
    longest = int(token_counts(prompts).max(initial=2))  # 2: the shortest probe
    if spec.sampling.environments:
        longest = max(longest, spec.data.max_tokens)
    return longest + max(spec.sampling.longest_responses.values())


def first_sync(cluster: Cluster, spec: RunSpec[RlConfig], data: RlData) -> WeightSync:
    """Return the sync of weights to the engines, after comparing both sides' first weights."""
    return prepare_sync(
        weight_route(cluster, spec),
        spec.config.rollout.sync,
        probe_sequences(data.train, spec),
        coarser_dtype(spec),
        send_first=sends_first(spec),
    )


def weight_route(cluster: Cluster, spec: RunSpec[RlConfig]) -> WeightRoute:
    """Return the way of the actor's weights to the engines."""
    rollout, budget = spec.config.rollout, spec.workload.largest_pack(cluster.streams)
    quantised = spec.actor.model.quantization != "none"
    all_first = quantised or _begins_adapted(spec)
    whole = ActorRoute(cluster, spec.sender.name, budget, rollout, all_first=all_first)
    return AdapterRoute(cluster, whole) if spec.sends_adapter_alone else whole


def coarser_dtype(spec: RunSpec[RlConfig]) -> str:
    """Return the coarser of the formats of numbers in which trainer and engines compute."""
    both = spec.actor.model.dtype, spec.config.rollout.rounds_as
    return max(both, key=lambda name: ROUNDING[name])


def sends_first(spec: RunSpec[RlConfig]) -> bool:
    """Return whether engines need the trainer's weights before they compute as it does."""
    changed = spec.actor.model.quantization != "none" or _begins_adapted(spec)
    return changed or spec.rank_sleep != "none"


def _begins_adapted(spec: RunSpec[RlConfig]) -> bool:
    """Return whether the actor begins with an adapter of an earlier run."""
    return spec.actor.adapter is not None and spec.actor.adapter.path is not None


def free_memory_for_sync(cluster: Cluster, spec: RunSpec[RlConfig]) -> None:
    """Free the card memory of ranks that a weight sync does not need, where they share cards.

    What allocators keep is freed; if ranks sleep, all moves to the host but the weights to be sent.
    Call it before engines wake, and after loading, which needs more memory than sampling does.
    """
    if spec.rank_sleep != "none":
        senders = [name for name, role in spec.roles.items() if role.sends]
        on_all_ranks(cluster, Worker.sleep, spec.rank_sleep, *senders)
    elif spec.config.rollout.placement == "shared":
        on_all_ranks(cluster, Worker.give_back)


def put_ranks_to_sleep(cluster: Cluster, spec: RunSpec[RlConfig]) -> None:
    """Move the actor's weights to the host, too, once the engines have them, if ranks sleep so."""
    if spec.rank_sleep == "all":
        on_all_ranks(cluster, Worker.sleep, "all")


def wake_sleeping_ranks(cluster: Cluster, spec: RunSpec[RlConfig]) -> None:
    """Wake the ranks of a run whose ranks sleep, for loading, restoring or saving.

    The engines sleep until the next sync, so that the ranks have all of the cards' memory.
    """
    if spec.rank_sleep != "none":
        wake_ranks(cluster, spec)


def wake_ranks(cluster: Cluster, spec: RunSpec[RlConfig]) -> None:
    """Wake the ranks, after the engines have gone to sleep, if their settings let them."""
    cluster.engines_do(RolloutEngine.sleep)
    if spec.rank_sleep != "none":
        on_all_ranks(cluster, Worker.wake)
