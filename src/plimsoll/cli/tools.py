"""The commands about plans, runs, models and the machine.

They are demo, plan, eval, export, report, rollouts, calibrate, doctor, merge, serve-reward,
try-reward and watch.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.cli.options import REPLAY_FLAG, Parser, flags_of, show
from plimsoll.errors import ConfigError, DoesNotFit

if TYPE_CHECKING:
    from plimsoll.resolve.run_spec import RunSpec


def demo(words: list[str]) -> None:
    """Run `plimsoll demo` with these words."""
    parser = Parser(
        "demo",
        description="Make a small task and model, SFT it, improve it by PPO, and show how well.",
    )
    parser.add_argument(
        "--directory",
        type=expanduser,
        default="runs/demo",
        help="where all is written (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of task, model and runs (%(default)s)")
    parser.add_argument(
        "--files-only",
        action="store_true",
        help="write data, model and the configs sft, dpo, ppo and grpo; train nothing",
    )
    # What comes before the jobs and after them has a process of its own, too: see cli/first.py.
    parser.add_argument("--begin", action="store_true", help=SUPPRESS)
    parser.add_argument("--end", type=float, help=SUPPRESS)
    options = parser.parse_args(words)
    home = Path(options.directory)
    if options.files_only:
        from plimsoll.commands.demo import prepare

        prepare(home, options.seed)
        show(f"{home} is ready. First: plimsoll sft {home}/sft.yaml\n")
    elif options.begin:
        from plimsoll.commands.demo import begin

        begin(home, options.seed)
    elif options.end is not None:
        from plimsoll.commands.demo import end

        end(home, options.end)
    else:
        from plimsoll.cli.first import run_stages

        run_stages(options.directory, options.seed)


def _open_plan(options: Namespace, flags: list[str]) -> None:
    """Serve the plan as a page. Raises ConfigError for options that the page does not use."""
    parser = _plan_parser()
    if not options.open:
        parser.error("--host and --port are of the page that --open serves")
    used = {"config", "cluster", "nodes", "host_memory", "replay", "open", "host", "port"}
    others = [name for name, value in vars(options).items() if value and name not in used]
    if others:
        parser.error(f"--open shows the plan as a page, without --{' and --'.join(others)}")

    from plimsoll.commands.report import open_plan

    open_plan(options.config, flags, options.host or "127.0.0.1", options.port or 0)


def _plan_parser() -> Parser:
    parser = Parser(
        "plan",
        usage="plimsoll plan CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Say what a run would weigh on every card and host, by role, phase and item, "
        "and whether it fits. Needs no GPU, no weights and no data. Ends with code 3 where it does "
        "not fit.",
    )
    parser.add_argument("config", help="the config of a job, which its first line names: # ppo")
    parser.add_argument("--cluster", help="the cards of each machine, such as 8xA100-80GB, or cpu")
    parser.add_argument("--nodes", type=int, help="machines")
    parser.add_argument("--host-memory", help="of each machine, such as 1TB")
    parser.add_argument("--replay", metavar="RUN", help="of a run that replays another, no engines")
    parser.add_argument(
        "--all", action="store_true", help="every item, and drawn; all that is suggested, in full"
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print JSON instead: everything")
    printed.add_argument(
        "--apply",
        type=int,
        metavar="N",
        help="print instead the config with the answer that --suggest calls N",
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="write that config to a file")
    parser.add_argument("--force", action="store_true", help="over the file that is there")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page, too")
    parser.add_argument(
        "--suggest", action="store_true", help="search for changes that would make it fit"
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="serve the plan as a page instead, on which settings are tried; Ctrl-C ends it",
    )
    parser.add_argument("--host", help="of --open: who may ask (default: 127.0.0.1, this host)")
    parser.add_argument("--port", type=int, help="of --open (default: a free one)")
    return parser


def plan(words: list[str]) -> None:
    """Run `plimsoll plan` with these words."""
    options, flags = _plan_parser().parse_with_flags(words)

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
        _open_plan(options, flags)
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
    if options.out is None and options.force:
        raise ConfigError("--force is for the file of -o, and none is given.")
    if options.out is not None and options.apply is None:
        raise ConfigError("-o is for the config that --apply N makes, and no answer is named.")
    if options.out is not None and Path(options.out).is_dir():
        raise ConfigError(f"-o {options.out} is a directory. Name a file.")
    if options.out is not None and Path(options.out).exists() and not options.force:
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
    """Run `plimsoll report` with these words."""
    parser = Parser(
        "report",
        description="Predicted against measured memory of a run, by process and phase; writes "
        "RUN/report.html with the same, the curves, the plan and the config.",
    )
    parser.add_argument("run", help="a run.directory")
    options = parser.parse_args(words)

    from plimsoll.commands.report import report_run

    show(report_run(Path(options.run)))


def rollouts(words: list[str]) -> None:
    """Run `plimsoll rollouts` with these words."""
    parser = Parser(
        "rollouts",
        description="Show what was sampled in a step of reinforcement learning: a line for each "
        "group, or a group in full, its responses side by side with their rewards.",
    )
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
    parser.add_argument(
        "--mask", action="store_true", help="show all tokens; `+` marks those that are learned from"
    )
    _add_trust(parser)
    parser.add_argument(
        "--bad", action="store_true", help="steps left out because a number was not finite"
    )
    parser.add_argument(
        "--bundle",
        type=expanduser,
        metavar="FILE",
        help="write all that the step computed with into one file, for `plimsoll check-bundle`",
    )
    options = vars(parser.parse_args(words))
    options["trusted"] = options.pop("trust_run")
    if bundle := options.pop("bundle"):
        from plimsoll.commands.bundle import write_bundle

        show(write_bundle(Path(options["run"]), options["step"], Path(bundle)))
        return

    from plimsoll.commands.rollouts import RolloutQuery, show_rollouts
    from plimsoll.run.console import terminal_of

    path = Path(options.pop("run"))
    terminal = terminal_of(sys.stdout)
    show(show_rollouts(path, RolloutQuery(**options), None if terminal is None else terminal.width))


def explain_gap(words: list[str]) -> None:
    """Run `plimsoll explain-gap` with these words."""
    parser = Parser(
        "explain-gap",
        usage="plimsoll explain-gap CONFIG.yaml [--section.key VALUE ...]",
        description="Find out why the engines' log-probs are not the trainer's: loads the actor "
        "and the engines of a config, compares them on the first prompts and on sampled answers, "
        "and does it again with one setting changed at a time (dtype, attention, prefix cache, "
        "...). Trains nothing.",
        epilog="Example: plimsoll explain-gap grpo.yaml --actor.model.path runs/grpo/model",
    )
    parser.add_argument("config", help="a config of plimsoll rl")
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.explain_gap import explain_gap
    from plimsoll.run.output import tell

    show(explain_gap(options.config, flags, tell))


def check_bundle(words: list[str]) -> None:
    """Run `plimsoll check-bundle` with these words."""
    parser = Parser(
        "check-bundle",
        description="Compute the rewards' sums, advantages, returns and the policy loss of a "
        "bundle again, without the model, and compare them with those of the run. Ends with code "
        "1 if they differ.",
        epilog="Example: plimsoll rollouts runs/grpo --step 12 --bundle step-12.zip; "
        "plimsoll check-bundle step-12.zip",
    )
    parser.add_argument("bundle", metavar="FILE", help="what `plimsoll rollouts --bundle` wrote")
    _add_trust(parser)
    options = parser.parse_args(words)

    from plimsoll.commands.bundle import check_bundle
    from plimsoll.errors import PlimsollError

    checked = check_bundle(Path(options.bundle), trusted=options.trust_run)
    show(checked.text())
    if checked.wrong:
        raise PlimsollError("computed again, not equal:\n" + "\n".join(checked.wrong))


def calibrate(words: list[str]) -> None:
    """Run `plimsoll calibrate` with these words."""
    parser = Parser(
        "calibrate",
        description="Fit the few constants of the plan that depend on versions and machine (the "
        "size of processes, CUDA's context, the allocator's gap) to what runs measured. Use it "
        "where the runs ran. Formulas are never fitted.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run.directory")
    parser.add_argument(
        "--out",
        type=expanduser,
        default="calibration.json",
        help="the file to write (%(default)s)",
    )
    options = parser.parse_args(words)

    from plimsoll.commands.calibrate import calibrate

    show(calibrate([Path(run) for run in options.runs], Path(options.out)))


def doctor(words: list[str]) -> None:
    """Run `plimsoll doctor` with these words."""
    parser = Parser(
        "doctor",
        description="Check this machine: versions, CUDA, GPUs and what sits on them, memory, "
        "limits, disks, compilers, Ray. Says how to mend what is wrong, and then ends with code 1.",
    )
    parser.add_argument("--directory", default="runs", help="where runs go (%(default)s)")
    parser.add_argument("--address", help="host:port of a Ray cluster that should answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(words)

    from plimsoll.commands.doctor import (
        examine,
        findings_json,
        refuse_wrong,
        render_findings,
    )
    from plimsoll.run.console import terminal_of

    findings = examine(options.directory, options.address)
    if options.json:
        show(findings_json(findings))
    else:
        show(render_findings(findings, terminal_of(sys.stdout)))
    refuse_wrong(findings)


def merge(words: list[str]) -> None:
    """Run `plimsoll merge` with these words."""
    parser = Parser(
        "merge",
        description="Merge an adapter into its base, out of place: writes a plain model that "
        "transformers and vLLM load.",
    )
    parser.add_argument("adapter", help="the adapter's directory, such as runs/NAME/model")
    parser.add_argument("--out", type=expanduser, required=True, help="the directory to write")
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
    parser.add_argument("--no-double-quantization", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(words)

    from plimsoll.commands.found_models import refuse_existing, refuse_no_adapter

    adapter, out = Path(options.adapter), Path(options.out)
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
    """Run `plimsoll export` with these words."""
    parser = Parser(
        "export",
        description="Write the actor of a run's checkpoint, of any ZeRO stage and number of ranks, "
        "as a directory that transformers and vLLM load; an adapter as PEFT does.",
    )
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run.directory, or a checkpoint")
    parser.add_argument(
        "--to",
        type=expanduser,
        required=True,
        metavar="DIRECTORY",
        help="the directory to write",
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the weights; default: the run's"
    )
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    _add_trust(parser)
    options = parser.parse_args(words)

    from plimsoll.commands.found_models import find_checkpoint, refuse_existing

    to = Path(options.to)
    refuse_existing("--to", to)
    checkpoint = find_checkpoint(
        Path(options.source), merge=options.merge, trusted=options.trust_run
    )
    from plimsoll.commands.export import export_checkpoint
    from plimsoll.train.how_to_use import actor_use

    export_checkpoint(checkpoint, to, options.dtype, merge=options.merge)
    adapter = checkpoint.spec.actor.adapter is not None and not options.merge
    noun, use = actor_use(checkpoint.spec, to, adapter=adapter)
    show(f"The {noun} of {checkpoint.path} is in {to}: {use}.")


def evaluate(words: list[str]) -> None:
    """Run `plimsoll eval` with these words."""
    parser = Parser(
        "eval",
        usage="plimsoll eval CONFIG|RUN [--section.key VALUE ...] [options]",
        description="Measure a model on data.eval as the config's job does: likelihood (sft, "
        "distill), preference accuracy (dpo, kto), accuracy and calibration of scores (rm, prm), "
        "or the rewards of sampled answers, and of several to a prompt pass@k and maj@k (ppo, "
        "grpo, ...). Writes eval.json, and eval-calibration.svg (rm, prm) or the answers to "
        "eval-answers.parquet (ppo, grpo, ...).",
    )
    parser.add_argument("source", metavar="CONFIG|RUN", help="a config, or a run.directory")
    parser.add_argument(
        "--model",
        type=expanduser,
        help="what to measure; default: the final model of RUN, or the config's actor",
    )
    parser.add_argument(
        "--out",
        type=expanduser,
        metavar="DIRECTORY",
        help="where to write; default: the run.directory",
    )
    _add_trust(parser)
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.found_models import find_model

    model = find_model(options.source, flags, options.model, options.out, trusted=options.trust_run)
    from plimsoll.commands.evaluate import run_eval

    show(run_eval(model))


def _add_trust(parser: Parser) -> None:
    """Add the flag for run directories that hold code, or name it."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="let the config of RUN name code, which then runs as you, and keys to send",
    )


def serve_reward(words: list[str]) -> None:
    """Run `plimsoll serve-reward` with these words."""
    parser = Parser(
        "serve-reward",
        usage="plimsoll serve-reward CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Answer over HTTP what the rewards and reward models of a config give, in "
        "Plimsoll's request format and in OpenRLHF's: POST to /NAME, and to /score and "
        "/get_reward where one is served. Ends with Ctrl-C.",
    )
    parser.add_argument("config", help="a config with rewards or reward models")
    parser.add_argument("--reward", metavar="NAME", help="serve only this one")
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (%(default)s: this host)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (%(default)s)")
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.serve_reward import choose_rewards, serve
    from plimsoll.machine.guard import require_server

    require_server()
    serve(choose_rewards(options.config, flags, options.reward), options.host, options.port)


def try_reward(words: list[str]) -> None:
    """Run `plimsoll try-reward` with these words."""
    parser = Parser(
        "try-reward",
        usage="plimsoll try-reward CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Call the rewards of a config before any model is loaded: on the first rows, "
        "each with three responses (its reference, the reference of another row, and no text), or "
        "on what a step of an earlier run sampled, beside the rewards that it gave. "
        "Ends with code 1 if a reward failed.",
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
    parser.add_argument("--run", type=expanduser, help="the run.directory of an earlier run")
    parser.add_argument("--step", type=int, help="a step of --run (default: the last)")
    options, flags = parser.parse_with_flags(words)
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}, and at least 1 row is needed")
    if options.step is not None and options.run is None:
        parser.error("--step is a step of a run: give --run RUN, too")

    from plimsoll.commands.try_reward import score_again, try_rewards
    from plimsoll.errors import PlimsollError

    tried = (
        try_rewards(options.config, flags, options.rows)
        if options.run is None
        else score_again(options.config, flags, Path(options.run), options.step, options.rows)
    )
    show(tried.text())
    if tried.failures:
        raise PlimsollError("\n".join(tried.failures))


def watch(words: list[str]) -> None:
    """Run `plimsoll watch` with these words."""
    parser = Parser(
        "watch",
        description="Serve a page of runs that keeps itself up to date: progress, curves, health, "
        "samples, time, memory, config. Of several runs the curves are overlaid, and configs "
        "compared. Ends with Ctrl-C.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run.directory, of any state; or a directory of runs",
    )
    parser.add_argument("--host", default="127.0.0.1", help="who may ask (%(default)s: this host)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--token-file",
        type=expanduser,
        metavar="FILE",
        help="the token of the address, for Prometheus; written if missing (default: a new one)",
    )
    options = parser.parse_args(words)

    from plimsoll.commands.report import watch as serve

    runs = [Path(expanduser(run)) for run in options.runs]
    token_file = None if options.token_file is None else Path(options.token_file)
    serve(runs, options.host, options.port, token_file)
