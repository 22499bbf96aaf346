"""The commands about plans, runs, models and the machine.

They are demo, plan, eval, export, report, rollouts, calibrate, doctor, merge, serve-reward,
try-reward and watch.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from json import dumps
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.cli.options import REPLAY_FLAG, Parser, flags_of, show
from plimsoll.errors import ConfigError, DoesNotFit, PlimsollError

if TYPE_CHECKING:
    from plimsoll.resolve.run_spec import RunSpec


def _open_plan(parser: Parser, options: Namespace, flags: list[str]) -> None:
    """Serve the plan as a page. Raises ConfigError for options that the page does not use."""
    if not options.open:
        parser.error("--host and --port are of the page that --open serves")
    used = {"config", "cluster", "nodes", "host_memory", "replay", "open", "host", "port"}
    others = [name for name, value in vars(options).items() if value and name not in used]
    if others:
        parser.error(f"--open shows the plan as a page, without --{' and --'.join(others)}")

    from plimsoll.commands.report import open_plan

    open_plan(options.config, flags, options.host or "127.0.0.1", options.port or 0)


def _plan_parser() -> Parser:
    parser = Parser("plan", plan.__doc__, takes="CONFIG.yaml")
    parser.add_argument("config", help="the config of a job, which its first line names: # ppo")
    parser.machines()
    parser.add_argument("--nodes", type=int, help="machines")
    parser.add_argument("--replay", metavar="RUN", help="of a run that replays another, no engines")
    parser.switch("--all", "every item, and drawn; all that is suggested, in full")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print JSON instead: everything")
    printed.add_argument(
        "--apply",
        type=int,
        metavar="N",
        help="print instead the config with the answer that --suggest calls N",
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="write that config to a file")
    parser.switch("--force", "over the file that is there")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page, too")
    parser.switch("--suggest", "search for changes that would make it fit")
    parser.switch(
        "--open", "serve the plan as a page instead, on which settings are tried; Ctrl-C ends it"
    )
    parser.add_argument("--host", help="of --open: who may ask (default: 127.0.0.1, this host)")
    parser.add_argument("--port", type=int, help="of --open (default: a free one)")
    return parser


def plan(words: list[str]) -> None:
    """Say what a run would weigh on every card and host, by role, phase and item.

    Say whether it fits, too. Needs no GPU, no weights and no data. Ends with code 3 where it does
    not fit.
    """
    parser = _plan_parser()
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.planning import (
        advise_job,
        plan_job,
        plan_json,
        refuse_conflicts,
        render_short_plan,
        render_whole_plan,
    )
    from plimsoll.jobs.which import load_any
    from plimsoll.run.files import write_whole

    _check_together(options)
    stand_for = {
        "--cluster": ("--cluster.hardware", options.cluster),
        "--nodes": ("--cluster.nodes", options.nodes),
        "--host-memory": ("--cluster.host_memory", options.host_memory),
        "--replay": (REPLAY_FLAG, options.replay),
    }
    flags += flags_of(stand_for, flags)
    if options.open or options.host or options.port is not None:
        _open_plan(parser, options, flags)
        return
    spec = load_any(options.config, flags)
    if options.apply is not None:
        _apply(options, flags, spec)
        return
    plan = plan_job(spec)
    advice = advise_job(spec) if options.suggest else None
    render = plan_json if options.json else render_whole_plan if options.all else render_short_plan
    show(render(plan, advice))
    if options.html:
        from plimsoll.commands.report import plan_html

        write_whole(Path(options.html), plan_html(options.config, flags, plan))
    refuse_conflicts(plan.problems)
    if plan.verdict == "does not fit":
        raise DoesNotFit(f"{options.config} does not fit")


def _check_together(options: Namespace) -> None:
    """Raise ConfigError for options that contradict each other, and for an existing output file."""
    if options.apply is not None and options.html:
        raise ConfigError("--apply prints a config and no plan. Plan that config with --html.")
    if options.out is None:
        if options.force:
            raise ConfigError("--force is for the file of -o, and none is given.")
        return
    if options.apply is None:
        raise ConfigError("-o is for the config that --apply N makes, and no answer is named.")
    if Path(options.out).is_dir():
        raise ConfigError(f"-o {options.out} is a directory. Name a file.")
    if Path(options.out).exists() and not options.force:
        raise ConfigError(
            f"-o {options.out} is there already. Choose another name, or write over it by --force."
        )


def _apply(options: Namespace, flags: list[str], spec: RunSpec[Any]) -> None:
    """Print the config with one answer of the planner applied, or write it to the file of -o."""
    from plimsoll.commands.planning import advise_job, apply_answer
    from plimsoll.run.files import write_whole

    text = apply_answer(options.config, flags, advise_job(spec), options.apply)
    if options.out is None:
        show(text.removesuffix("\n"))
        return
    write_whole(Path(options.out), text)
    show(f"{options.out}: {options.config} with answer {options.apply}")


def report(words: list[str]) -> None:
    """Compare predicted with measured memory of a run, by process and phase.

    Writes RUN/report.html with the same, the curves, the plan and the config.
    """
    parser = Parser("report", report.__doc__)
    parser.add_argument("run", help="a run.directory")
    options = parser.parse_args(words)

    from plimsoll.commands.report import report_run

    show(report_run(Path(options.run)))


def rollouts(words: list[str]) -> None:
    """Show what was sampled in a step of reinforcement learning.

    This is a line for each group, or a group in full, its responses side by side with their
    rewards.
    """
    parser = Parser("rollouts", rollouts.__doc__)
    parser.add_argument("run", metavar="RUN|FILE", help="a run.directory, or a Parquet file of one")
    parser.add_argument("--step", type=int, metavar="N", help="default: the last")
    parser.add_argument("--group", type=int, metavar="G", help="only the group of this number")
    parser.add_argument("--prompt", metavar="TEXT", help="only prompts that hold the text")
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--worst", dest="order", action="store_const", const="worst", help="the lowest mean reward"
    )
    order.add_argument(
        "--best", dest="order", action="store_const", const="best", help="the highest mean reward"
    )
    order.add_argument(
        "--diff",
        type=int,
        metavar="STEP",
        help="the prompt whose mean reward changed most, beside what this step had",
    )
    parser.add_argument(
        "--count", type=int, default=1, metavar="C", help="groups to show in full (%(default)s)"
    )
    parser.switch("--mask", "show all tokens; `+` marks those that are learned from")
    parser.trust()
    parser.switch("--bad", "steps left out because a number was not finite")
    parser.path(
        "--bundle",
        metavar="FILE",
        help="write all that the step computed with into one file, for `plimsoll check-bundle`",
    )
    options = vars(parser.parse_args(words))
    options["trusted"] = options.pop("trust_run")
    if bundle := options.pop("bundle"):
        from plimsoll.commands.bundle import write_bundle

        show(write_bundle(Path(options["run"]), options["step"], bundle))
        return

    from plimsoll.commands.rollouts import RolloutQuery, show_rollouts
    from plimsoll.run.console import terminal_of

    path = Path(options.pop("run"))
    terminal = terminal_of(sys.stdout)
    show(show_rollouts(path, RolloutQuery(**options), None if terminal is None else terminal.width))


def explain_gap(words: list[str]) -> None:
    """Find out why the engines' log-probs are not the trainer's.

    Loads the actor and the engines of a config, compares them on the first prompts and on sampled
    answers, and does it again with one setting changed at a time (dtype, attention, prefix cache,
    ...). Trains nothing.
    """
    parser = Parser(
        "explain-gap",
        explain_gap.__doc__,
        takes="CONFIG.yaml",
        epilog="Example: plimsoll explain-gap grpo.yaml --actor.model.path runs/grpo/model",
    )
    parser.add_argument("config", help="a config of plimsoll rl")
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.explain_gap import explain_gap as explain
    from plimsoll.run.output import tell

    show(explain(options.config, flags, tell))


def check_bundle(words: list[str]) -> None:
    """Compute what a bundle's step computed again, without the model, and compare.

    Compares the rewards' sums, advantages, returns and the policy loss with those of the run. Ends
    with code 1 if they differ.
    """
    parser = Parser(
        "check-bundle",
        check_bundle.__doc__,
        epilog="Example: plimsoll rollouts runs/grpo --step 12 --bundle step-12.zip; "
        "plimsoll check-bundle step-12.zip",
    )
    parser.add_argument("bundle", metavar="FILE", help="what `plimsoll rollouts --bundle` wrote")
    parser.trust()
    options = parser.parse_args(words)

    from plimsoll.commands.bundle import check_bundle as check

    lines, wrong = check(Path(options.bundle), trusted=options.trust_run)
    show("\n".join(lines))
    if wrong:
        raise PlimsollError("computed again, not equal:\n" + "\n".join(wrong))


def calibrate(words: list[str]) -> None:
    """Fit the few constants of the plan that depend on versions and machine to measurements.

    They are the size of processes, CUDA's context and the allocator's gap, as runs measured them.
    Use it where the runs ran. Formulas are never fitted.
    """
    parser = Parser("calibrate", calibrate.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run.directory")
    parser.path("--out", default="calibration.json", help="the file to write (%(default)s)")
    options = parser.parse_args(words)

    from plimsoll.commands.calibrate import calibrate as fit

    show(fit([Path(run) for run in options.runs], options.out))


def doctor(words: list[str]) -> None:
    """Check this machine, and say how to mend what is wrong.

    Looks at versions, CUDA, GPUs and what sits on them, memory, limits, disks, compilers and Ray.
    Ends with code 1 if something is wrong.
    """
    parser = Parser("doctor", doctor.__doc__)
    parser.add_argument("--directory", default="runs", help="where runs go (%(default)s)")
    parser.add_argument("--address", help="host:port of a Ray cluster that should answer")
    parser.switch("--json", "print JSON instead of the table")
    options = parser.parse_args(words)

    from plimsoll.commands.doctor import diagnose, refuse_wrong, render_findings, report
    from plimsoll.commands.doctor_machine import observe
    from plimsoll.run.console import terminal_of

    findings = diagnose(observe(options.directory, options.address))
    if options.json:
        show(dumps(report(findings), indent=2))
    else:
        show(render_findings(findings, terminal_of(sys.stdout)))
    refuse_wrong(findings)


def merge(words: list[str]) -> None:
    """Merge an adapter into its base, out of place.

    Writes a plain model that transformers and vLLM load.
    """
    parser = Parser("merge", merge.__doc__)
    parser.add_argument("adapter", help="the adapter's directory, such as runs/NAME/model")
    parser.path("--out", required=True, help="the directory to write")
    parser.add_argument("--base", help="the model to merge into; default: as the adapter says")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the weights; default: the base's"
    )
    parser.add_argument(
        "--quantization",
        choices=["none", "nf4"],
        default="none",
        help="nf4: merge into what a 4-bit base stands for, over which the adapter was trained",
    )
    parser.switch("--no-double-quantization")
    parser.switch("--trust-remote-code")
    options = parser.parse_args(words)

    from plimsoll.commands.found_models import refuse_existing, refuse_no_adapter

    adapter, out = Path(options.adapter), options.out
    refuse_existing("--out", out)
    refuse_no_adapter(adapter, options.base)
    from plimsoll.commands.export import merge_adapter
    from plimsoll.train.how_to_use import policy_use, scorer_use

    scores = merge_adapter(
        adapter,
        out,
        options.base,
        dtype=options.dtype,
        quantization=options.quantization,
        double_quantization=not options.no_double_quantization,
        trust_remote_code=options.trust_remote_code,
    )
    use = scorer_use(steps=False) if scores else policy_use(out)
    show(f"The merged {'reward model' if scores else 'model'} is in {out}: {use}.")


def export(words: list[str]) -> None:
    """Write the actor of a run's checkpoint as a directory that transformers and vLLM load.

    The checkpoint may be of any ZeRO stage and number of ranks. An adapter is written as PEFT does.
    """
    parser = Parser("export", export.__doc__)
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run.directory, or a checkpoint")
    parser.path("--to", required=True, metavar="DIRECTORY", help="the directory to write")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the weights; default: the run's"
    )
    parser.switch("--merge", "merge the adapter into its base")
    parser.trust()
    options = parser.parse_args(words)

    from plimsoll.commands.found_models import find_checkpoint, refuse_existing

    to, source = options.to, Path(options.source)
    refuse_existing("--to", to)
    checkpoint, spec = find_checkpoint(source, merge=options.merge, trusted=options.trust_run)
    from plimsoll.commands.export import export_checkpoint
    from plimsoll.train.how_to_use import actor_use

    export_checkpoint(checkpoint, spec, to, options.dtype, merge=options.merge)
    adapter = spec.actor.adapter is not None and not options.merge
    noun, use = actor_use(spec, to, adapter=adapter)
    show(f"The {noun} of {checkpoint} is in {to}: {use}.")


def evaluate(words: list[str]) -> None:
    """Measure a model on data.eval as the config's job does.

    Gives likelihood (sft, distill), preference accuracy (dpo, kto), accuracy and calibration of
    scores (rm, prm), or the rewards of sampled answers, and of several to a prompt pass@k and maj@k
    (ppo, grpo, ...). Writes eval.json, and eval-calibration.svg (rm, prm) or the answers to
    eval-answers.parquet (ppo, grpo, ...).
    """
    parser = Parser("eval", evaluate.__doc__, takes="CONFIG|RUN")
    parser.add_argument("source", metavar="CONFIG|RUN", help="a config, or a run.directory")
    measured = "what to measure; default: the final model of RUN, or the config's actor"
    parser.add_argument("--model", type=expanduser, help=measured)
    parser.path("--out", metavar="DIRECTORY", help="where to write; default: the run.directory")
    parser.trust()
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.found_models import find_model

    model = find_model(options.source, flags, options.model, options.out, trusted=options.trust_run)
    from plimsoll.commands.evaluate import run_eval

    show(run_eval(model))


def serve_reward(words: list[str]) -> None:
    """Answer over HTTP what the rewards and reward models of a config give.

    Takes Plimsoll's request format and OpenRLHF's: POST to /NAME, and to /score and /get_reward
    where one is served. Ends with Ctrl-C.
    """
    parser = Parser("serve-reward", serve_reward.__doc__, takes="CONFIG.yaml")
    parser.add_argument("config", help="a config with rewards or reward models")
    parser.add_argument("--reward", metavar="NAME", help="serve only this one")
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (%(default)s: this host)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (%(default)s)")
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.serve_reward import choose_rewards, serve
    from plimsoll.machine.guard import require_server

    require_server()
    chosen = choose_rewards(options.config, flags, options.reward)
    serve(*chosen, options.host, options.port)


def try_reward(words: list[str]) -> None:
    """Call the rewards of a config before any model is loaded.

    Calls them on the first rows, each with three responses (its reference, the reference of another
    row, and no text), or on what a step of an earlier run sampled, beside the rewards that it gave.
    Ends with code 1 if a reward failed.
    """
    parser = Parser(
        "try-reward",
        try_reward.__doc__,
        takes="CONFIG.yaml",
        epilog="Example: plimsoll try-reward grpo.yaml --rewards.mine.name rewards.py:mine "
        "--run runs/grpo --step 12",
    )
    parser.add_argument("config", help="a config of plimsoll rl")
    parser.add_argument(
        "--rows",
        type=int,
        default=4,
        help="of data.train; with --run the responses to show, most changed first (%(default)s)",
    )
    parser.path("--run", help="the run.directory of an earlier run")
    parser.add_argument("--step", type=int, help="a step of --run (default: the last)")
    options, flags = parser.parse_with_flags(words)
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}, and at least 1 row is needed")
    if options.step is not None and options.run is None:
        parser.error("--step is a step of a run: give --run RUN, too")

    from plimsoll.commands.try_reward import score_again, try_rewards

    text, failures = (
        try_rewards(options.config, flags, options.rows)
        if options.run is None
        else score_again(options.config, flags, options.run, options.step, options.rows)
    )
    show(text)
    if failures:
        raise PlimsollError("\n".join(failures))


def watch(words: list[str]) -> None:
    """Serve a page of runs that keeps itself up to date.

    Shows progress, curves, health, samples, time, memory, config. Of several runs the curves are
    overlaid, and configs compared. Ends with Ctrl-C.
    """
    parser = Parser("watch", watch.__doc__)
    runs = "a run.directory, of any state; or a directory of runs"
    parser.path("runs", metavar="RUN", nargs="+", help=runs)
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (%(default)s: this host)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.path(
        "--token-file",
        metavar="FILE",
        help="the token of the address, for Prometheus; written if missing (default: a new one)",
    )
    options = parser.parse_args(words)

    from plimsoll.commands.report import watch as serve

    serve(options.runs, options.host, options.port, options.token_file)
