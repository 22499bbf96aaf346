"""The memory levers of models and of the run at large, and the list of all memory levers.

A new lever is one more entry in the list for its settings. The levers of an engine are in the
`levers.py` of its folder. Refusals, the suggestions of `plimsoll plan --suggest`, the report of a
run out of memory and the page of a plan offer all LEVERS.

Levers of models change the activations that a forward keeps for its backward pass, the number of
weights that learn, and the bits of weights and moments. Levers of the run change the micro-batches
of a step, the work done before the steps, the ranks and machines that share a step, and the length
of its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import plimsoll.sampler.levers as rollout
from plimsoll.config.cluster import MAIN_RANKS, RANK_KEYS, NodeGroup, RankKind
from plimsoll.config.engines import ROLLOUT_ENGINES, TRAINER_ENGINES, folder_value
from plimsoll.config.problems import UNPLACED, UNSTARTED
from plimsoll.memory.levers.trials import Change, apply_changes, changes_between, value_at
from plimsoll.resolve.decisions import fast_dtype
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.timeline.items import KINDS, Kind
from plimsoll.timeline.levers import Lever, LeverValue, Move, Relief, Situation, halves, has_cards

_CHUNK = "model.head_chunk"
_CHECKPOINTING = "model.gradient_checkpointing"
_EVERY = "model.checkpoint_every"
_INPUTS = "model.activation_offload"
_TILE = "model.mlp_tile"
_MOMENTS = "optimizer.kind"
_ADAPTER = "adapter.rank"
_QUANTIZATION = "model.quantization"

_SMALL = 256
"""Rows of logits at once: fewer save little more."""
_TILES = (4096, 1024)
"""Tokens of an MLP at once: more saves little, and fewer would not fill a card."""
_ADAPTER_RANK = 16
_BACKWARD: tuple[Phase, ...] = ("train_actor", "train_critic")
"""The phases with a backward pass: only there are activations kept for it."""


def _more_checkpointing(at: Situation) -> Sequence[Move]:
    """Return moves that checkpoint more layers, and more of each layer."""
    ways = (True,) if at.trained.model.gradient_checkpointing else ("selective", True)
    return [{_CHECKPOINTING: way, _EVERY: 1} for way in ways]


def _smaller_tiles(at: Situation) -> Sequence[Move]:
    """Return moves to smaller tiles of MLPs; none if micro-batches are not larger."""
    before = at.trained.model.mlp_tile or at.spec.workload.budget
    return [{_TILE: tokens} for tokens in _TILES if tokens < before]


def _narrow_moments(at: Situation) -> Sequence[Move]:
    """Return the move to moments of 8 bits; nothing if the role's engine does not support them."""
    key, before, narrow = at.spec.roles[at.role].key, at.trained.optimizer.kind, "adamw_8bit"
    spec = apply_changes(at.spec, [Change(f"{key}.{_MOMENTS}", before, narrow)])
    return () if spec is None else [{_MOMENTS: narrow}]


def _quantised_base(at: Situation) -> Sequence[Move]:
    rank = at.trained.adapter.rank if at.trained.adapter else _ADAPTER_RANK
    return [{_QUANTIZATION: "nf4", _ADAPTER: rank}]


_STATES: tuple[Kind, ...] = ("gradients", "optimizer states", "buffers")

_trained_lever = partial(Lever, scope="trained")

_OF_MODELS: tuple[Lever, ...] = (
    _trained_lever(
        keys=(_CHUNK,),
        words="smaller pieces of logits",
        cost="logits come in smaller pieces: the same loss",
        rank=10,
        settings=lambda at: [{_CHUNK: _SMALL}] if at.trained.model.head_chunk > _SMALL else (),
        reliefs=(Relief(("activations",)),),
    ),
    _trained_lever(
        keys=(_CHECKPOINTING, _EVERY),
        words="gradient checkpointing",
        cost="checkpointed layers are computed twice; "
        "with selective, only what is element by element",
        rank=20,
        settings=_more_checkpointing,
        reliefs=(Relief(("activations",), phases=_BACKWARD),),
        control=True,
    ),
    _trained_lever(
        keys=(_TILE,),
        words="MLPs in tiles of tokens",
        cost="MLPs are computed twice; in layers with gradient_checkpointing: true "
        "only their last product is added",
        rank=25,
        settings=_smaller_tiles,
        reliefs=(Relief(("activations",)),),
        control=True,
    ),
    _trained_lever(
        keys=(_INPUTS,),
        words="inputs of checkpointed layers in host memory",
        cost="offloaded layer inputs cross PCIe in each forward and backward pass",
        rank=30,
        settings=lambda at: [{_INPUTS: "cpu"}] if at.trained.model.gradient_checkpointing else (),
        reliefs=(Relief(("activations",), where=("device",), phases=_BACKWARD),),
        applies=has_cards,
        control=True,
    ),
    _trained_lever(
        keys=(_MOMENTS,),
        words="moments of 8 bits",
        cost="moments in 8 bits are rounded to 256 values in each block",
        rank=50,
        effect="rounding",
        settings=_narrow_moments,
        reliefs=(Relief(("optimizer states",)),),
    ),
    _trained_lever(
        keys=(_ADAPTER,),
        words="adapters",
        cost="only adapters of a small part of the size learn, and may learn less",
        rank=60,
        effect="adapters",
        settings=lambda at: () if at.trained.adapter else [{_ADAPTER: _ADAPTER_RANK}],
        reliefs=(Relief((*_STATES, "frozen models", "rollout engines")),),
        control=True,
    ),
    _trained_lever(
        keys=(_QUANTIZATION,),
        words="adapters on bases of 4 bits",
        cost="a base in 4 bits answers a little differently, and is unpacked at each use",
        rank=70,
        effect="adapters",
        settings=_quantised_base,
        reliefs=(Relief((*_STATES, "weights")),),
        control=True,
    ),
)


_MICRO_BATCH = "batch.micro_batch_tokens"
_PRECOMPUTE = "reference_logprobs.precompute"
_CHECKPOINTS = "run.keep_checkpoints"
_BACKGROUND = "run.save_in_background"
_WHERE = "cluster.where"
_RANKS = "cluster.ranks"
_SHARDS = "cluster.sequence_parallel"
_CRITIC_RANKS = "cluster.critic_ranks"
_REWARD_RANKS = "cluster.reward_ranks"
_NODES = "cluster.nodes"
_OWN_NODES = "cluster.own_nodes"
_MAX_TOKENS = "data.max_tokens"

_MOST_TIMES = 8
"""The most nodes, as a multiple of the given ones: more is never a sensible change."""
_STEP = 64
"""Tokens; shorter lengths are multiples of this."""


def _smaller_micro_batches(at: Situation) -> Sequence[Move]:
    """Return moves to 1/2, 1/4, ... of the token budget, down to the longest sequence (or pair)."""
    work, shards = at.spec.workload, at.spec.cluster.sequence_parallel
    budgets = halves(work.budget // shards, -(-work.least_budget // shards))
    return [{_MICRO_BATCH: tokens} for tokens in budgets]


def _shared_packs(at: Situation) -> Sequence[Move]:
    """Return moves to more ranks that share a pack, the fewest first; ranks take free cards.

    A rank gets the fewest tokens with which the longest sequence (or pair) fits a pack.
    """
    spec, cluster = at.spec, at.spec.cluster
    more = 0 if cluster.own_ranks else max(0, _free_cards(at, cluster.nodes))
    cards, moves = cluster.ranks + more, list[Move]()
    for shards in range(cluster.sequence_parallel + 1, cards + 1):
        tokens = -(-spec.workload.least_budget // shards)
        ranks = shards * min(cards // shards, spec.workload.units)
        if cards % shards or tokens >= spec.workload.budget // cluster.sequence_parallel:
            continue
        move: dict[str, LeverValue] = {_SHARDS: shards, _MICRO_BATCH: tokens}
        if ranks != cluster.ranks:
            move[_RANKS] = ranks
        if cluster.where == "local":
            move[_WHERE] = "ray"
        moves.append(move)
    return moves


def _free_cards(at: Situation, nodes: int) -> int:
    """Return how many cards of `nodes` nodes are free; negative if there are too few cards.

    Engines that share the ranks' cards take none. On CPU the number is 0.
    """
    cards = nodes * len(at.hardware.node.cards)
    taken = at.spec.cluster.all_ranks + _cards_of_engines(at.spec)
    return 0 if at.device == "cpu" else cards - taken


def _cards_of_engines(spec: RunSpec[Any]) -> int:
    """Return the number of cards that only engines use."""
    engines = spec.engines
    return engines.all_parts if engines and engines.placement == "own" else 0


def _ranks_on_free_cards(at: Situation) -> Move:
    """Return the move to ranks on all free cards, as far as each stream gets a sequence (or pair).

    The move is empty if no rank can be added, or if roles have ranks of their own.
    """
    cluster = at.spec.cluster
    shards = cluster.sequence_parallel
    cards = cluster.ranks + _free_cards(at, cluster.nodes)
    ranks = shards * min(cards // shards, at.spec.workload.units)
    more = not cluster.own_ranks and ranks > cluster.ranks
    return {_RANKS: ranks} if more else {}


def _larger_cluster(at: Situation, steps: int) -> dict[str, int]:
    """Return a move to more nodes with ranks on all their cards.

    Each step adds one node for each group of ranks.
    """
    cluster, nodes = at.spec.cluster, at.spec.cluster.nodes + steps
    each = steps * (len(at.hardware.node.cards) or max(1, cluster.ranks // cluster.nodes))
    own_nodes = cluster.own_nodes.counts
    if not (own_nodes or cluster.own_ranks):
        shards = cluster.sequence_parallel
        ranks = cluster.ranks + (_free_cards(at, nodes) if at.cards else each)
        return {_RANKS: max(1, ranks // shards) * shards, _NODES: nodes}
    counts = cluster.rank_counts
    groups = [kind for kind in counts if kind in own_nodes or not own_nodes]
    return {
        **{_key(kind): counts[kind] + each for kind in groups},
        **{f"{_OWN_NODES}.{kind}": own_nodes[kind] + steps for kind in groups if own_nodes},
        _NODES: cluster.nodes + steps * len(groups),
    }


def _key(kind: RankKind) -> str:
    return f"cluster.{RANK_KEYS[kind]}"


def _other_ranks(at: Situation) -> Sequence[Move]:
    """Return moves to ranks on free cards, to as many ranks as there are cards, and to half.

    A run in one process gets the move to ranks on free cards with Ray.
    """
    spec, cluster = at.spec, at.spec.cluster
    filled = _ranks_on_free_cards(at)
    if cluster.where == "local":
        return [{_WHERE: "ray", **filled}] if filled else ()
    taken = _cards_of_engines(spec) + sum(cluster.own_ranks.values())
    counts = [at.cards - taken] if at.cards else []
    shards = cluster.sequence_parallel
    counts = [count // shards * shards for count in (*counts, cluster.ranks // 2)]
    fewer = {count for count in counts if 0 < count < cluster.ranks}
    return [filled, *({_RANKS: count} for count in sorted(fewer, reverse=True))]


def _nodes_for(at: Situation, ranks: int) -> int:
    """Return the number of nodes with a card for every process and `ranks` more ranks.

    Without cards the further ranks get one more node.
    """
    cluster, cards = at.spec.cluster, len(at.hardware.node.cards)
    needed = cluster.all_ranks + _cards_of_engines(at.spec) + ranks
    return max(cluster.nodes, -(-needed // cards)) if cards else cluster.nodes + bool(ranks)


def _apart_ranks(kind: RankKind, at: Situation) -> int:
    """Return how many ranks of their own the roles of a kind could get.

    0 if they have their own ranks already, or cannot have them.
    """
    cluster = at.spec.cluster
    return cluster.ranks if _could_part(kind, at.spec) and kind not in cluster.own_ranks else 0


def _apart(kind: RankKind, at: Situation) -> Sequence[Move]:
    """Return the move that gives the roles of a kind their own ranks on free cards."""
    ranks = _apart_ranks(kind, at)
    fits = ranks and _nodes_for(at, ranks) == at.spec.cluster.nodes
    return [{_key(kind): ranks}] if fits else ()


def _on_own_nodes(kind: RankKind, at: Situation, ranks: int) -> dict[str, int]:
    """Return the move that gives a kind of role `ranks` ranks, and each group its own nodes."""
    cards = len(at.hardware.node.cards) or at.spec.cluster.ranks
    groups = dict[NodeGroup, int](at.spec.cluster.rank_counts.items())
    groups |= {kind: ranks, "engines": _cards_of_engines(at.spec)}
    nodes = {f"{_OWN_NODES}.{name}": -(-count // cards) for name, count in groups.items() if count}
    return {_key(kind): ranks, **nodes, _NODES: sum(nodes.values())}


def _more_nodes(at: Situation) -> Sequence[Move]:
    """Return moves to more nodes, the fewest first.

    The nodes are for processes without a card, for a critic or reward models on their own ranks, or
    for ranks on all their cards, as far as each rank gets a sequence (or pair).
    """
    spec, nodes = at.spec, at.spec.cluster.nodes
    moves = [{_NODES: _nodes_for(at, 0)}]
    for kind in RANK_KEYS:
        if apart := _apart_ranks(kind, at):
            moves += [{_key(kind): apart, _NODES: _nodes_for(at, apart)}]
            moves += [_on_own_nodes(kind, at, apart)]
    moves = [move for move in moves if move[_NODES] > nodes]
    for steps in range(1, (_MOST_TIMES - 1) * nodes + 1):
        move = _larger_cluster(at, steps)
        streams = (move.get(_key(k), 0) // spec.cluster.shards_of(k) for k in RANK_KEYS)
        if max(streams) <= spec.workload.units:
            moves.append(move)
    return sorted(moves, key=lambda move: move[_NODES])


def _shorter_sequences(at: Situation) -> Sequence[Move]:
    """Return moves to shorter sequences, in steps of 64 tokens.

    A job that samples gets shorter responses, because prompts stay. Micro-batches get the fewest
    tokens that the sequences need.
    """
    spec = at.spec
    key = _MAX_TOKENS if spec.sampling is None else spec.sampling.longest_key
    written = value_at(spec.config, key)
    assert isinstance(written, int)
    lengths = range(_STEP * ((written - 1) // _STEP), 0, -_STEP)
    return [_with_length(spec, key, length, length - written) for length in lengths]


def _with_length(spec: RunSpec[Any], key: str, length: int, more: int) -> Move:
    work = spec.workload
    tokens = min(work.budget, (work.longest + more) * work.together)
    tokens = -(-tokens // spec.cluster.sequence_parallel)
    move: dict[str, LeverValue] = {key: length, _MICRO_BATCH: tokens}
    held_out = {} if spec.sampling is None else spec.sampling.held_out
    for name, sampling in held_out.items():
        if sampling.max_new_tokens > length:
            move[f"{name}.max_new_tokens"] = length
    return move


def _could_part(kind: RankKind, spec: RunSpec[Any]) -> bool:
    """Return whether the roles of a kind could have ranks beside those of the actor."""
    groups = {role.group for role in spec.roles.values()}
    is_other = kind != MAIN_RANKS and {kind, MAIN_RANKS} <= groups
    return is_other and spec.cluster.where == "ray"


_ANY = Relief(KINDS)
_ON_CARDS = Relief(KINDS[:-2], where=("device",))
_FROZEN_ON_CARDS = Relief(("frozen models", "activations"), where=("device",))

_OF_THE_RUN: tuple[Lever, ...] = (
    Lever(
        keys=(_MICRO_BATCH,),
        words="smaller micro-batches",
        cost="the step comes in more pieces: the same gradient",
        rank=10,
        settings=_smaller_micro_batches,
        reliefs=(Relief(("activations", "frozen models")),),
        control=True,
    ),
    Lever(
        keys=(_PRECOMPUTE,),
        words="a reference that scores before the actor is loaded",
        cost="the reference scores every row before the first step",
        rank=20,
        settings=lambda at: [{_PRECOMPUTE: True}],
        reliefs=(Relief(("frozen models",)),),
        applies=lambda spec: spec.may_precompute,
        control=True,
    ),
    Lever(
        keys=(_BACKGROUND,),
        words="checkpoints that are written at once",
        cost="training waits while a checkpoint is written",
        rank=15,
        settings=lambda at: [{_BACKGROUND: False}],
        reliefs=(Relief(("buffers",), where=("host",)),),
        applies=lambda spec: spec.run.copies_states,
    ),
    Lever(
        keys=(_CHECKPOINTS,),
        words="fewer checkpoints",
        cost="only the last checkpoint is there to go back to",
        rank=10,
        settings=lambda at: [{_CHECKPOINTS: 1}] if at.spec.run.keep_checkpoints > 1 else (),
        reliefs=(),
        codes=frozenset({"disk-space"}),
    ),
    Lever(
        keys=(_RANKS, _WHERE),
        words="another number of ranks on the same machines",
        cost="another number of ranks shares the step: "
        "more of them take free cards, fewer are slower",
        rank=40,
        settings=_other_ranks,
        reliefs=(_ANY,),
        codes=UNPLACED,
        control=True,
    ),
    Lever(
        keys=(_SHARDS, _MICRO_BATCH, _RANKS, _WHERE),
        words="ranks that share each pack",
        cost="a pack is exchanged between ranks in each attention, and fewer are computed at once",
        rank=25,
        settings=_shared_packs,
        reliefs=(Relief(("activations",), where=("device",)),),
        control=True,
    ),
    Lever(
        keys=(_CRITIC_RANKS,),
        words="a critic on free cards of its own",
        cost="the critic's cards are idle while the actor trains, and the other way round",
        rank=40,
        settings=partial(_apart, "critic"),
        reliefs=(_ON_CARDS,),
        applies=partial(_could_part, "critic"),
        control=True,
    ),
    Lever(
        keys=(_REWARD_RANKS,),
        words="reward models on free cards of their own",
        cost="the reward models' cards are idle while the others work, and the other way round",
        rank=40,
        settings=partial(_apart, "reward"),
        reliefs=(_FROZEN_ON_CARDS,),
        applies=partial(_could_part, "reward"),
        control=True,
    ),
    Lever(
        keys=(_NODES, _RANKS, _CRITIC_RANKS, _REWARD_RANKS, _OWN_NODES),
        words="more nodes",
        cost="other machines; between them the network is slower than the cards' link",
        rank=80,
        effect="machines",
        settings=_more_nodes,
        reliefs=(_ANY,),
        applies=lambda spec: spec.cluster.where == "ray",
        codes=UNPLACED,
        control=True,
    ),
    Lever(
        keys=(_MAX_TOKENS,),
        words="shorter sequences",
        cost="longer rows are refused, or cut with data.over_long: truncate; responses are cut off",
        rank=90,
        effect="shorter",
        settings=_shorter_sequences,
        reliefs=(_ANY,),
        codes=UNSTARTED,
        control=True,
    ),
)

LEVERS: tuple[Lever, ...] = (
    *(*_OF_THE_RUN, *_OF_MODELS),
    *(lever for package in TRAINER_ENGINES for lever in folder_value(package, "levers", ())),
    *rollout.LEVERS,
    *(lever for package in ROLLOUT_ENGINES for lever in folder_value(package, "levers", ())),
)


def levers_by_rank() -> list[Lever]:
    """Return all levers, the cheapest first."""
    return sorted(LEVERS, key=lambda lever: lever.rank)


def moves_of(lever: Lever, at: Situation, role: RoleName | None = None) -> list[Move]:
    """Return the moves of a lever that change something in a run, the mildest first.

    Args:
        lever: the lever.
        at: the run on its machines.
        role: the one role whose keys are changed; None: all roles of the lever, together.
    """
    roles = [name for name in lever.roles(at.spec) if role in (None, name)]
    offers = [
        [in_section(at.spec, name, move) for move in lever.settings(replace(at, role=name))]
        for name in roles
    ]
    longest = max(map(len, offers), default=0)
    together = (
        merge_moves([o[min(step, len(o) - 1)] for o in offers if o]) for step in range(longest)
    )
    return [move for move in together if changes_between(at.spec, move)]


def merge_moves(moves: Iterable[Move]) -> Move:
    """Return several moves as one; if two set the same key, the later one holds."""
    return {key: value for move in moves for key, value in move.items()}


def in_section(spec: RunSpec[Any], role: RoleName, move: Move) -> Move:
    """Return a move with full dotted keys, and with the keys that must be set together with them.

    Args:
        spec: the run.
        role: the role in whose section the keys are; "" if they are full keys already.
        move: the move with keys of the section.
    """
    if not role:
        return move
    made = {f"{spec.roles[role].key}.{key}": value for key, value in move.items()}
    if spec.roles[role].given or not changes_between(spec, made):
        return made
    return {**made, **_reference_model(spec)}


def _reference_model(spec: RunSpec[Any]) -> Mapping[str, Any]:
    """Return the settings of the actor's model as keys of the reference's model.

    They are its defaults, but must be written as soon as the config sets another reference key.
    """
    left_out = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}  # of learning
    if spec.actor.model.dtype == fast_dtype(spec.cluster)[0]:  # as it is decided for the reference
        left_out.add("dtype")
    fields = spec.written.actor.model.model_dump(exclude_defaults=True, exclude=left_out)
    return {f"reference.model.{key}": value for key, value in fields.items()}
