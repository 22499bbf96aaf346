"""Learn again from the trajectories that an earlier run sampled and stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from plimsoll.config.problems import refuse
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Trajectory
from plimsoll.resolve.rules.stored import check_replayed
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.ahead import staleness_metrics
from plimsoll.rl.setup import RlData, RlWork, load_prompt_data
from plimsoll.rl.source import Experience, Source
from plimsoll.run.directory import RunDirectory
from plimsoll.run.numbers import plural
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import read_trajectories
from plimsoll.train.session import RunSession


@dataclass(frozen=True)
class Replay(Source):
    """A `Source` that reads the trajectories of an earlier run, step by step.

    Attributes:
        work: the open job.
        run: the directory of the earlier run.
    """

    work: RlWork
    run: RunDirectory

    @classmethod
    def open(cls, work: RlWork) -> Replay:
        """Return the source for the run that `rollout.replay` names."""
        path = work.config.rollout.replay
        assert path is not None, "only a run that replays has no engines"
        return cls(work, RunDirectory(Path(path)))

    def begin(self, state: RunState) -> None:
        """Raise ConfigError if prompts wait that engines were sampling."""
        if state.unlearned:
            raise ConfigError(
                f"rollout.replay: the checkpoint of step {state.step} has "
                f"{plural(len(state.unlearned), 'prompt')} that engines were sampling, and a "
                "replay cannot go on with them. Leave rollout.replay out, or begin a new "
                "run.directory."
            )

    def draw(self, state: RunState) -> Experience:
        """Return the stored trajectories of the step after `state`.

        Raises ConfigError if they have other group sizes, or are longer, than the config says.
        """
        step = state.step + 1
        with self.work.session.phase("score", self.work.cluster):
            trajectories = read_trajectories(self.run.trajectories_path(step))
            _check_step(trajectories, step, self.work.spec)
            if self.work.config.rollout.routing == "live":
                trajectories = [t.change_branches(_without_routing) for t in trajectories]
        asynchronous = self.work.config.rollout.staleness > 0
        metrics = staleness_metrics(trajectories, state.weight_version) if asynchronous else {}
        return Experience(trajectories, {}, self.work.config.batch.prompts, metrics)


def _without_routing(branch: Trajectory) -> Trajectory:
    return replace(branch, routing=None)


def load_replay_data(session: RunSession, spec: RunSpec[RlConfig]) -> RlData:
    """Return the prompts of a run that replays, after checking the stored run.

    Before a model is loaded, raises ConfigError or SettingsConflict if steps are missing in the
    stored run, or if its tokens mean another text to the actor's tokenizer.
    """
    data = load_prompt_data(session, spec)
    known = replace(spec, rows=len(data.train))  # run.epochs now says how many steps there are
    refuse(check_replayed(known))
    _check_tokens(known)
    return data


def _check_tokens(spec: RunSpec[RlConfig]) -> None:
    """Raise ConfigError if the tokens of the first step mean another text to the actor."""
    path, model = spec.config.rollout.replay, spec.actor.model
    assert path is not None, "asked of a run that samples"
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    for t in read_trajectories(RunDirectory(Path(path)).trajectories_path(1)):
        text = str(tokenizer.decode(t.response_tokens.tolist(), skip_special_tokens=True))
        if not text.startswith(t.response_text):  # a stop string is in the tokens alone
            raise ConfigError(
                f"rollout.replay: the run in {path} sampled the tokens of "
                f"{t.response_text[:40]!r}, and to the tokenizer of {model.path} they are "
                f"{text[:40]!r}. Give a run of a model with the same tokenizer as "
                "actor.model.path, or that model."
            )


def _check_step(trajectories: list[Trajectory], step: int, spec: RunSpec[RlConfig]) -> None:
    """Raise ConfigError if groups differ from the config in size, or if sequences are longer."""
    batch, where = spec.config.batch, f"step {step} in {spec.config.rollout.replay}"
    sizes = Counter(t.group for t in trajectories)
    if list(sizes.values()) != [batch.responses] * batch.prompts:
        raise ConfigError(
            f"rollout.replay: {where} has {plural(len(sizes), 'group')} of {min(sizes.values())} "
            f"to {max(sizes.values())} responses, and batch.prompts is {batch.prompts}, "
            f"batch.responses {batch.responses}. Give these as that run had them."
        )
    assert spec.sampling is not None, "asked of a run that replays samples"
    new_key = spec.sampling.longest_key
    new = spec.sampling.longest_responses[new_key]
    for what, key, most, lengths in (
        (
            "prompt",
            "data.max_tokens",
            spec.data.max_tokens,
            [len(t.prompt.tokens) for t in trajectories],
        ),
        ("response", new_key, new, [len(t.loss_mask) for t in trajectories]),
    ):
        if max(lengths) > most:
            raise ConfigError(
                f"rollout.replay: {where} has a {what} of {max(lengths)} tokens, and {key} is "
                f"{most}. Give at least {max(lengths)}, which memory is then planned by."
            )
