"""Group and engines as Ray actors, supervised: errors name the process that died or hangs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import gcd
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from plimsoll.cluster.dispatch import EngineQueue
from plimsoll.cluster.exit_reason import (
    death_reason,
    exit_reason,
    failing_process,
    hang_error,
    last_crash_line,
    message,
    says_out_of_memory,
)
from plimsoll.cluster.heartbeats import Hang
from plimsoll.cluster.placement import PROCESS_NAMES, Claim
from plimsoll.cluster.protocol import Group, Pending, SentOnce, Shortages
from plimsoll.cluster.ray_actors import Member
from plimsoll.cluster.ray_members import (
    EngineHome,
    call_on_node,
    create_engine,
    create_ranks,
    find_places,
    members,
    rank_members,
    shared_homes,
)
from plimsoll.cluster.ray_rewards import RewardNodes
from plimsoll.cluster.ray_start import start_ray, wait_for_nodes
from plimsoll.cluster.ray_watch import HangWatch, first_ended, naming_slow_starts, take_errors
from plimsoll.config.cluster import (
    MAIN_RANKS,
    RANK_NAMES,
    ClusterConfig,
    DecidedExchange,
    Device,
    RankKind,
    decided_exchange,
)
from plimsoll.errors import EngineDied, PlimsollError, WorkerDied, WorkerFailed
from plimsoll.machine.incident import NodeState, OutOfMemory, Sighting, read_node
from plimsoll.machine.processes import ask_for_stacks, end_processes, read_host
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import RewardHosts
from plimsoll.run.displays import write_lines_to
from plimsoll.run.numbers import plural
from plimsoll.run.readings import Reading
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.trainer.process_group import Place

R = TypeVar("R")

_CULPRIT_SECONDS = 10.0
"""How long to wait for a death notice after an error that another process may have caused."""

_STACK_SECONDS = 2.0
"""How long processes may take to write their threads' stacks."""

_STOP_SECONDS = 10.0
"""How long engines may take to end their own processes."""


@dataclass(eq=False)
class RankGroup:
    """A `Group` of Ray actors.

    Attributes:
        members: The actors, stream by stream.
        wait: A function of the cluster that takes a method's name and open calls, returns their
            results, and watches all members meanwhile.
        see: A function of the cluster that adds to a member's error what the cluster sees of it.
        shortages: Where memory has run out so far.
        shards: How many ranks work on a stream together.
    """

    members: Sequence[Member]
    wait: Callable[[str, Mapping[Any, Member]], list[Any]]
    see: Callable[[Member, OutOfMemory], OutOfMemory]
    shortages: Shortages
    shards: int = 1

    @property
    def streams(self) -> int:
        """The number of data-parallel shares."""
        return len(self.members) // self.shards

    def call(self, task: Callable[..., R], per_stream: Iterable[tuple[object, ...]]) -> Pending[R]:
        """Begin a method of `Worker` on every rank, with the arguments of the rank's stream."""
        per_rank = (own for own in per_stream for _ in range(self.shards))
        pairs = zip(self.members, per_rank, strict=True)
        calls = {m.actor.call.remote(task.__name__, *map(_stored, own)): m for m, own in pairs}
        return Pending(lambda: self.wait(task.__name__, calls), self.shards)

    def all(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank with the same arguments."""
        return self.wait(task.__name__, _calls(self.members, task, *arguments))

    def memory_error(self, stream: int, shard: int, error: OutOfMemory) -> OutOfMemory:
        """Return an error that a rank has returned, with what is seen of the rank."""
        return self.see(self.members[stream * self.shards + shard], error)


@dataclass
class _OpenCalls:
    """Calls whose results coroutines of another thread wait for.

    Attributes:
        pending: The open calls.
        given_up: Calls whose coroutines were cancelled.
        failed: Calls that failed. The thread that calls the cluster raises their errors; the
            coroutines that made them wait for ever.
    """

    pending: set[Any] = field(default_factory=set)
    given_up: list[Any] = field(default_factory=list)
    failed: list[tuple[Any, Member]] = field(default_factory=list)
    _ended: bool = False

    async def await_result(self, reference: Any, member: Member) -> Any:
        """Return the result of a call, or wait for ever if it failed (see `failed`)."""
        self.pending.add(reference)
        future = reference.future()
        future.add_done_callback(lambda _: self._end(reference))
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except RayError:
            self.failed.append((reference, member))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(reference)
            raise

    def _end(self, reference: Any) -> None:
        self._ended = True
        self.pending.discard(reference)
        with suppress(ValueError):
            self.given_up.remove(reference)

    def has_given_up(self) -> bool:
        """Return whether a call is open whose coroutine was cancelled."""
        return any(reference in self.pending for reference in [*self.given_up])

    def has_moved(self) -> bool:
        """Return whether a call has ended since the last `has_moved`, or no call is open."""
        ended, self._ended = self._ended, False
        return ended or not self.pending


class RayCluster(RankGroup):
    """A `Cluster` of Ray actors, which is the group of the actor's ranks itself."""

    def __init__(
        self, config: ClusterConfig, specs: Sequence[EngineSpec], threads: int, device: Device
    ) -> None:
        super().__init__(
            (),
            self._wait,
            self._memory_error,
            Shortages(config.memory_halvings),
            config.sequence_parallel,
        )
        self.engines = len(specs)
        most = max((s.rollout.max_sequences for s in specs), default=1)
        self._watches: dict[Any, Member] = {}
        self._groups: dict[RankKind, RankGroup] = {}
        self._ranks: list[Member] = []
        self._engines: list[Member] = []
        self._before: dict[str, NodeState] = {}
        self._readings: dict[str, Reading] = {}
        self._hangs = HangWatch(config.hang_timeout)
        self._asked, self._queue = _OpenCalls(), EngineQueue(self.engines, most)
        start_ray(config)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._homes: list[EngineHome] = []
        self._engines_may_die = False
        self._short: Counter[int] = Counter()
        self._to_replace: list[Member] = []
        self._most_halvings = config.memory_halvings
        self._patience = config.start_timeout
        try:
            self._start_members(config, specs, threads, device)
        except BaseException:
            # Engines cannot answer a call while they load.
            self._call_on_nodes(end_processes, (*self._ranks, *self._engines))
            self.close()
            raise
        self.own_groups: Mapping[str, Group] = {k: self._groups[k] for k in config.own_ranks}

    def _start_members(
        self, config: ClusterConfig, specs: Sequence[EngineSpec], threads: int, device: Device
    ) -> None:
        """Start all processes side by side, and wait for them.

        Each says at once where it is, then imports its libraries, which takes no card's memory.
        """
        patience = config.start_timeout
        nodes = wait_for_nodes(config, len(specs))
        self._nodes = nodes
        shared = device == "cuda" and any(s.rollout.placement == "shared" for s in specs)
        claims = [Claim(kind, count) for kind, count in config.rank_counts.items()]
        if specs and not shared:
            claims.append(Claim("engines", len(specs), specs[0].rollout.parts))
        places = find_places(config, claims, device, nodes)
        ranks = {k: create_ranks(places[k], device, threads) for k in config.rank_counts}
        homes = list(map(EngineHome, specs, places.get("engines", ())))
        engines = [*map(create_engine, homes)]
        for kind, actors in ranks.items():
            group: RankGroup = self
            if kind != MAIN_RANKS:
                limits = Shortages(config.memory_halvings)
                shards = config.shards_of(kind)
                group = RankGroup((), self._wait, self._memory_error, limits, shards)
            group.members = rank_members(PROCESS_NAMES[kind], actors, patience)
            self._groups[kind] = group
        groups = [*self._groups.values()]
        self._ranks = [member for group in groups for member in group.members]
        self._watch(self._ranks)
        if shared:
            homes = shared_homes(specs, self._ranks)
            engines = [*map(create_engine, homes)]
        self._homes = homes
        self._before = self._read_nodes(patience)
        starting = {m.actor.prepare.remote(): m for m in self._ranks}
        for group in groups:
            sharing = (group.shards, decided_exchange(config)) if group.shards > 1 else ()
            places_of_group = _places(group.members, device, threads, *sharing)
            for member, place in zip(group.members, places_of_group, strict=True):
                starting[member.actor.start.remote(place)] = member
        self._engines = members("rollout engine", engines, patience)
        with_specs = zip(self._engines, specs, strict=True)
        prepared = {member: member.actor.prepare.remote(spec) for member, spec in with_specs}
        if shared:  # vLLM counts as its own what the ranks put on its card while it measures
            self._wait_for_start(starting, patience)
            starting = {}
        starting |= {m.actor.start.remote(done): m for m, done in prepared.items()}
        results = self._wait_for_start(starting, patience)
        self._responses_per_request = int(results[-1]) if engines else 0
        self._watch(self._engines)
        self._hangs.add((*self._ranks, *self._engines))

    def let_engines_die(self) -> None:
        """From now on raise the death of an engine only in calls that need engines."""
        self._engines_may_die = True

    def revive_engines(self) -> list[str]:
        """Start engines that have died again, where they were; return the names of the dead."""
        watches = [w for w, member in self._watches.items() if member in self._engines]
        ended, _ = ray.wait(watches, num_returns=len(watches), timeout=0)
        ended += [w for w in watches if w not in ended and self._watches[w] in self._to_replace]
        self._to_replace.clear()
        dead = [self._watches.pop(watch) for watch in ended]
        self._hangs.remove(dead)
        self._asked.failed.clear()
        take_errors(ended)
        self._call_on_nodes(end_processes, dead)
        for member in dead:
            ray.kill(member.actor)
        numbers = [self._engines.index(member) for member in dead]
        actors = [create_engine(self._homes[number]) for number in numbers]
        started, starting = list[Member](), dict[Any, Member]()
        created = members("rollout engine", actors, self._patience)
        for number, unnamed in zip(numbers, created, strict=True):
            member = replace(unnamed, role=f"rollout engine {number}")
            prepared = member.actor.prepare.remote(self._homes[number].spec)
            starting[member.actor.start.remote(prepared)] = member
            self._engines[number] = member
            started.append(member)
        try:
            self._wait("start", starting, timeout=self._patience)
        finally:
            self._watch(started)  # one that died while it started is the next to be revived
        self._hangs.add(started)
        return [member.name for member in dead]

    def _wait_for_start(self, starting: Mapping[Any, Member], patience: float) -> list[Any]:
        late = dict(starting)

        def names() -> list[str]:
            return sorted({member.role for member in [*late.values()]})

        with naming_slow_starts(names, write_lines_to(sys.stdout)):
            results = dict(self._as_done("start", late, timeout=patience))
        return [results[reference] for reference in starting]

    @contextmanager
    def reward_hosts(self) -> Iterator[RewardHosts | None]:
        """Yield processes on all nodes that compute rewards; None if this is the only node."""
        if len(self._nodes) == 1:
            yield None
            return
        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        with closing(RewardNodes({n: addresses[n] for n in self._nodes})) as hosts:
            yield hosts

    def _watch(self, started: Sequence[Member]) -> None:
        self._watches |= {member.actor.watch.remote(): member for member in started}

    def first(self, task: Callable[..., R], *arguments: object) -> R:
        """Call a method of `Worker` on the actor's first rank alone."""
        answer: R = self._wait(task.__name__, _calls(self.members[:1], task, *arguments))[0]
        return answer

    def all_beside(self, task: Callable[..., R], *arguments: object) -> list[R]:
        """Call a method of `Worker` on every rank of the actor, in a thread beside other calls."""
        name = task.__name__
        calls = {m.actor.call_beside.remote(name, *arguments): m for m in self.members}
        return self._wait(name, calls)

    async def ask(self, request: Request, episode: int) -> list[Trajectory]:
        """Send a request to an engine and return its trajectories; see `Cluster`."""
        async with self._queue.serve(request, episode) as engine:
            member = self._engines[engine]
            reference = member.actor.call.remote("generate", request)
            trajectories: list[Trajectory] = await self._asked.await_result(reference, member)
        # All answers share the request's prompt instead of a copy each.
        prompts = request.each_prompt()
        return [replace(t, prompt=p) for t, p in zip(trajectories, prompts, strict=True)]

    def wait_for(self, future: Future[R]) -> R:
        """Return the result of work in another thread; watch all members meanwhile."""
        with self._hangs.looking("generate", future) as look:
            # An engine still works on a call whose coroutine gave up.
            while not future.done() or self._asked.has_given_up():
                first = look([*self._watches], self._asked.has_moved())
                self._raise_failed(self._asked)
                if isinstance(first, Hang):
                    raise self._hang_error(first)
                if first is not None:
                    raise self._death_error(first)
        return future.result()

    def _raise_failed(self, calls: _OpenCalls) -> None:
        if calls.failed:
            self._result(*calls.failed[0])

    def busy_seconds(self) -> list[float]:
        """Return for each engine the seconds so far in which it had requests."""
        return self._queue.busy_seconds()

    @property
    def engines_near(self) -> bool:
        """Whether every engine is on the node of rank 0."""
        return {m.host.node_id for m in self._engines} <= {self._ranks[0].host.node_id}

    def engines_do(self, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a method of `RolloutEngine` on every engine; return their results."""
        return self._wait(task.__name__, _calls(self._engines, task, *arguments))

    def hand_over(
        self, gather: Callable[..., Any], given: tuple[object, ...], receive: Callable[..., R]
    ) -> R:
        """Pass what `gather` returns on the first rank to all engines; see `Cluster`."""
        calls = _calls(self.members, gather, *given)
        first = next(iter(calls))
        # The result stays in the object store: engines fetch it from there, not from here.
        for _ in self._as_done(gather.__name__, calls, keep=[first]):
            pass
        answers: list[R] = self.engines_do(receive, first)
        return answers[0]

    def stream(
        self,
        send: Callable[..., Any],
        each: Sequence[tuple[object, ...]],
        receive: Callable[..., Any],
    ) -> None:
        """Have all ranks send, and all engines receive, time after time; see `Cluster`."""
        given, times = ray.put([*each]), [()] * len(each)
        calls = {m.actor.call_each.remote(send.__name__, given): m for m in self.members}
        calls |= {m.actor.call_each.remote(receive.__name__, times): m for m in self._engines}
        self._wait(receive.__name__, calls)

    def responses_per_request(self) -> int:
        """Return how many responses engines want in one request, if prompts suffice."""
        return self._responses_per_request

    def read_memory(self) -> dict[str, Reading]:
        """Return the memory of every process of the run, with its peaks since the last call."""
        members = self._members_by_name()
        try:
            readings = self._read(members)
        except EngineDied:
            if not self._engines_may_die:
                raise
            # The next call that needs the engine raises its death.
            ranks = {name: m for name, m in members.items() if m in self._ranks}
            readings = self._readings | self._read(ranks)
        self._readings = readings | {"controller": Reading(read_host())}
        return self._readings

    def _read(self, members: Mapping[str, Member]) -> dict[str, Reading]:
        method = "read_memory"
        readings = self._wait(method, {m.actor.call.remote(method): m for m in members.values()})
        return dict(zip(members, readings, strict=True))

    def _members_by_name(self) -> dict[str, Member]:
        """Return ranks and engines by their names in the plan and the ledger."""
        lists: dict[str, Sequence[Member]]
        lists = {RANK_NAMES[kind]: group.members for kind, group in self._groups.items()}
        lists["engine"] = self._engines
        return {f"{kind} {i}": m for kind, found in lists.items() for i, m in enumerate(found)}

    def _read_nodes(self, patience: float) -> dict[str, NodeState]:
        """Return the memory state of each rank's node, by Ray's ids of the nodes."""
        firsts = {member.host.node_id: member for member in reversed(self._ranks)}
        looks = {m.actor.look.remote(self._pids(node_id)): m for node_id, m in firsts.items()}
        return dict(zip(firsts, self._wait("look", looks, timeout=patience), strict=True))

    def _pids(self, node_id: str) -> list[int]:
        members = (*self._ranks, *self._engines)
        here = [os.getpid()] if node_id == self._node_id else []
        return here + [m.host.pid for m in members if m.host.node_id == node_id]

    def _sighting(self, member: Member) -> Sighting:
        """Return the state of a failed process's node, with the last readings of all processes."""
        members, node_id = self._members_by_name(), member.host.node_id
        before = self._before.get(node_id)
        try:
            after = call_on_node(node_id, read_node, self._pids(node_id))
        except PlimsollError:  # the node's driver fails; the caller is about to report an error
            after = None
        return Sighting(
            process=next(name for name, m in members.items() if m is member),
            node=member.host.node,
            card=None if before is None else member.host.card(before),
            before=before,
            after=after,
            nodes={name: m.host.node for name, m in members.items()},
            readings=self._readings,
        )

    def close(self) -> None:
        """End all ranks and engines, and leave Ray."""
        stopping = [member.actor.call.remote("stop") for member in self._engines]
        take_errors([*self._watches, *stopping])
        self._watches.clear()
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        everyone = (*self._engines, *self._ranks)
        for member in everyone:
            ray.kill(member.actor)
        # This ends stopped processes, too, which Ray cannot end.
        end_processes([m.host.pid for m in everyone if m.host.node_id == self._node_id])
        ray.shutdown()  # in a joined cluster this ends the run's part and frees its GPUs

    def _call_on_nodes(
        self, function: Callable[[Sequence[int]], R], members: Sequence[Member]
    ) -> list[R | None]:
        pids: dict[str, list[int]] = {}
        for member in members:
            pids.setdefault(member.host.node_id, []).append(member.host.pid)
        return [call_on_node(node_id, function, node_pids) for node_id, node_pids in pids.items()]

    def _wait(
        self, call: str, calls: Mapping[Any, Member], timeout: float | None = None
    ) -> list[Any]:
        results = dict(self._as_done(call, dict(calls), timeout=timeout))
        return [results[reference] for reference in calls]

    def _as_done(
        self,
        call: str,
        pending: dict[Any, Member],
        keep: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (reference, result) of each call as it ends and leaves `pending`.

        The caller may add calls to `pending` meanwhile. The wait raises if any member dies or
        hangs. Calls in `keep` are yielded with None, without fetching their results. With `timeout`
        (seconds) the wait has a limit instead of a watch for hangs, because starting processes give
        no signs of life yet.
        """
        with self._hangs.watching(call) as wait_for_first:
            try:
                while pending:
                    watches, beside = self._what_ends_a_wait(pending.values())
                    awaited = [*pending, *watches]
                    if timeout is None:
                        first = wait_for_first(awaited, beside.failed)
                    else:
                        first = first_ended(awaited, timeout)
                    self._raise_failed(beside)
                    if first is None:
                        names = ", ".join(member.name for member in pending.values())
                        logs = ", ".join(f"{m.host.log}.{{out,err}}" for m in pending.values())
                        why = f"no answer within {timeout} s (cluster.start_timeout)"
                        raise WorkerDied(f"{names}: {why}\n  Logs: {logs}")
                    if isinstance(first, Hang):
                        raise self._hang_error(first)
                    if first in self._watches:
                        raise self._death_error(first)
                    ready, _ = ray.wait(
                        [*pending], num_returns=len(pending), timeout=0, fetch_local=False
                    )
                    results = self._results({one: pending[one] for one in ready}, keep)
                    for one in ready:  # until here, the errors of all are taken below
                        del pending[one]
                    yield from results.items()
            finally:
                # The results in `keep` are large, and would be fetched with their errors.
                take_errors(reference for reference in pending if reference not in keep)

    def _results(self, ended: Mapping[Any, Member], keep: Sequence[Any]) -> dict[Any, Any]:
        """Return the results of calls that have ended; None for those in `keep`."""
        wanted = [reference for reference in ended if reference not in keep]
        try:
            return dict.fromkeys(ended) | dict(zip(wanted, ray.get(wanted), strict=True))
        except RayError:  # which member's call it was is found one by one
            return {r: None if r in keep else self._result(r, m) for r, m in ended.items()}

    def _what_ends_a_wait(self, busy: Iterable[Member]) -> tuple[list[Any], _OpenCalls]:
        """Return the references and the asked calls whose failure ends a wait for these members."""
        if not self._engines_may_die or any(member in self._engines for member in busy):
            return [*self._watches], self._asked
        ranks = [w for w, member in self._watches.items() if member not in self._engines]
        return ranks, _OpenCalls()

    def _hang_error(self, hang: Hang) -> PlimsollError:
        """Ask all members for their stacks, end the silent ones, and return the hang's error."""
        everyone = (*self._ranks, *self._engines)
        stopped = self._call_on_nodes(ask_for_stacks, everyone)
        time.sleep(_STACK_SECONDS)
        self._call_on_nodes(end_processes, [m for m in everyone if m.name in hang.silent])
        logs = {member.name: member.host.log for member in everyone}
        error = hang_error(hang, [*chain(*filter(None, stopped))], logs)
        names = {member.name for member in self._engines}
        return EngineDied(str(error)) if names.issuperset(hang.silent or ("",)) else error

    def _result(self, reference: Any, member: Member) -> Any:
        try:
            return ray.get(reference)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, OutOfMemory):
                raise self._engine_error(member, self._memory_error(member, cause)) from error
            if isinstance(cause, PlimsollError):
                raise type(cause)(f"{cause}\n  Reported by: {member.name}") from error
            # A call also fails if another member dies whose result, or whose part, it needs.
            ended, _ = ray.wait(list(self._watches), num_returns=1, timeout=_CULPRIT_SECONDS)
            if ended:
                raise self._death_error(ended[0]) from error
            if not isinstance(error, RayTaskError):
                raise self._exit_error(member, _death_cause(member, error)) from error
            # The caller may have needed the result of a member whose call failed first.
            process, everyone = failing_process(str(error)), (*self._ranks, *self._engines)
            failed = (m for m in everyone if (m.host.pid, m.host.node) == process)
            first, why = next(failed, member), f"{type(cause).__name__}: {cause}"
            if first in self._engines and says_out_of_memory(why):
                raise self._exit_error(first, why) from error
            raise WorkerFailed(message(f"{first.name} failed", why, first.host.log)) from error

    def _death_error(self, watch: Any) -> PlimsollError:
        member = self._watches[watch]
        try:
            return self._exit_error(member, str(ray.get(watch)))
        except RayError as error:
            return self._exit_error(member, _death_cause(member, error))

    def _exit_error(self, member: Member, why: str) -> PlimsollError:
        error = exit_reason(member.name, why, member.host.log, self._sighting(member))
        return self._engine_error(member, error)

    def _engine_error(self, member: Member, error: PlimsollError) -> PlimsollError:
        """Return EngineDied for an engine that another can replace; else the error itself.

        After a lack of memory the other samples half as many sequences at once.
        """
        if member not in self._engines:
            return error
        if isinstance(error, WorkerDied):
            return EngineDied(str(error))
        has_started = member in self._watches.values()
        number = self._engines.index(member)
        before = self._homes[number].spec.rollout.max_sequences
        is_last = before == 1 or self._short[number] == self._most_halvings
        may_go_on = self._engines_may_die and has_started and not is_last
        if not isinstance(error, OutOfMemory) or not may_go_on:
            return error
        self._short[number] += 1
        self._homes[number] = self._homes[number].with_sequences(before // 2)
        self._to_replace.append(member)
        return EngineDied(
            f"{error}\n  From now on it samples at most {plural(before // 2, 'sequence')} at once, "
            f"not {before} (max_sequences)"
        )

    def _memory_error(self, member: Member, error: OutOfMemory) -> OutOfMemory:
        what = f"{member.name} ran out of {error.incident.where} memory"
        text = message(what, error.incident.why, member.host.log)
        return error.with_sighting(text, self._sighting(member))


def _stored(argument: object) -> object:
    """Return an argument as it is sent: a list that is sent several times by its reference."""
    if not isinstance(argument, SentOnce):
        return argument
    if argument.reference is None:
        argument.reference = ray.put([*argument])
    return argument.reference


def _calls(
    members: Sequence[Member], task: Callable[..., Any], *arguments: object
) -> dict[Any, Member]:
    return {m.actor.call.remote(task.__name__, *arguments): m for m in members}


def _places(
    group: Sequence[Member],
    device: Device,
    threads: int,
    shards: int = 1,
    exchange: DecidedExchange = "heads",
) -> Iterator[Place]:
    """Yield each rank's place in the group's process group, whose address is the first rank's."""
    on_nodes = Counter(member.host.node_id for member in group)
    # Group are numbered node by node. If nodes have different numbers of ranks, they are seen as
    # parts of one size, none of which is on two nodes.
    per_node = gcd(*on_nodes.values())
    first, ranks = group[0].host, len(group)
    for rank in range(ranks):
        where = rank, ranks, first.node, first.port, device, threads, per_node
        yield Place(*where, shards, exchange)


def _death_cause(member: Member, error: RayError) -> str:
    return last_crash_line(member.host.log) or death_reason(str(error))
