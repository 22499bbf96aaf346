"""The rows of a run from one source and from several, with real files and a real session."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.preflight import check_inputs
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data import streamed
from plimsoll.data.dataset import load_samples
from plimsoll.data.fields import ReferenceCheck
from plimsoll.data.stored import fingerprint
from plimsoll.errors import ConfigError, DataError, Interrupted, SettingsConflict
from plimsoll.jobs.rl_loop import measure
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import Sample
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.reward.score import build_rule
from plimsoll.rl.setup import RlData, load_prompt_data
from plimsoll.run.phases import TimedPhase, read_current_phase
from plimsoll.run.readings import Planned
from plimsoll.train.run_data import RunData, epoch_metrics, load_data, repeat_warnings
from plimsoll.train.session import open_session

SUMS = [{"q": f"{a}+1=", "a": f" {a + 1}"} for a in range(6)]
PAGES = [{"body": "1234567890"}, {"body": ""}, {"body": "12"}]


@pytest.fixture
def home(model_home: Path) -> Path:
    """Return a current directory with a model, and data."""
    for name, rows in (("sums", SUMS), ("pages", PAGES)):
        (model_home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model_home


def sft(train: dict[str, Any], **data: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "run": {"directory": "run", "steps": 1, "tensorboard": False},
            "cluster": {"where": "local"},
            "data": {"train": train, "max_tokens": 8, "on_bad_row": "skip", **data},
            "actor": {"model": {"path": "model"}},
        }
    )


def load(train: dict[str, Any], **data: Any) -> RunData[Sample]:
    with open_session(spec_of(sft(train, **data)), Planned()) as session:
        return load_data(session, load_samples)


DATED = "{{ strftime_now('%d=%M=') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def dated(date: str | None) -> tuple[str, list[list[int]]]:
    """Return the date of a run that goes on if it can, and the tokens of its rows."""
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    config = sft(sums, chat_template=DATED, max_tokens=32, date=date)
    config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    with open_session(spec_of(config), Planned()) as session:
        data = load_data(session, load_samples)
        kept = session.spec.data.date
        assert kept is not None and session.spec.written.data.date == kept
        return kept, [sample.tokens.tolist() for sample in data.train]


def test_the_date_of_a_run_is_the_one_that_it_began_with(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it, no run with a template that writes the date would go on after midnight."""
    began = dated("2001-02-03T04:05")
    assert dated(None) == began and began[0] == "2001-02-03T04:05"
    assert "it stays 2001-02-03T04:05" in capsys.readouterr().out
    shutil.rmtree("run")
    new = dated(None)
    assert datetime.now() - datetime.fromisoformat(new[0]) < timedelta(minutes=5)
    assert new[1] != began[1] and dated(None) == new


def test_a_date_that_cannot_be_read_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.date[^$]*isoformat"):
        sft({"path": "sums.jsonl", "text": "q"}, date="3rd of July")


def test_a_source_may_have_a_chat_template_of_its_own(home: Path) -> None:
    """The model's tokenizer has none, so the other source would need `data.chat_template`."""
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    marked = {**sums, "chat_template": "{% for m in messages %}={{ m.content }}{% endfor %}"}
    data = load({"plain": {**sums, "chat_template": "none"}, "marked": marked}, max_tokens=16)
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(sample.tokens) for sample in (data.train[0], data.train[6])]
    assert [text.replace(" ", "") for text in texts] == ["0+1=1<end>", "=0+1==1"]
    report = refusal_of({"plain": {**sums, "chat_template": "none"}, "marked": sums})
    assert "data.chat_template" in report and "brings no chat template" in report
    lost = refusal_of({"path": "sums.jsonl", "text": "a", "chat_template": "none"})
    assert "  data.train.chat_template: none" in lost


def refusal_of(train: dict[str, Any]) -> str:
    """Return the refusal of a config before anything is loaded."""
    spec = spec_of(sft(train))
    with pytest.raises(ConfigError) as refused:
        check_agreement(spec)
        check_inputs(spec)
    return str(refused.value)


def test_several_sources_are_numbered_through(home: Path) -> None:
    """The first page gives 2 samples, the last 1, and the middle one is bad."""
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a", "weight": 3}
    pages = {"path": "pages.jsonl", "text": "body"}
    data = load({"sums": sums, "pages": pages}, chat_template="none", eval=pages_alone())
    portions = [(p.name, p.rows, p.weight) for p in data.order.portions]
    assert portions == [("sums", 6, 3.0), ("pages", 3, 1.0)]
    assert [len(sample.tokens) for sample in data.train] == [7] * 6 + [8, 4, 3]
    assert len(data.eval) == 3
    assert set(data.order.indices(0, 12).tolist()) == set(range(9))
    assert epoch_metrics(data.order, 12) == {"epoch/sums": 9 / 6, "epoch/pages": 3 / 3}
    bad = [json.loads(line) for line in (home / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"], row["field"]) for row in bad] == [
        ("pages.jsonl", 2, "body")
    ] * 2


@pytest.mark.usefixtures("home")
def test_one_refusal_lists_the_bad_rows_of_all_sources() -> None:
    nothing = Path("nothing.jsonl")
    nothing.write_text("")
    train = {"pages": pages_alone(), "none": {"path": str(nothing), "text": "body"}}
    with pytest.raises(DataError) as refusal:
        load(train, eval=pages_alone(), on_bad_row="stop")
    message = str(refusal.value)
    assert len(re.findall(r"1 of 3 rows of pages\.jsonl", message)) == 2
    assert len(re.findall(r"pages\.jsonl:2: body: .*empty", message)) == 2
    assert "nothing.jsonl holds no rows" in message


def pages_alone() -> dict[str, str]:
    return {"path": "pages.jsonl", "text": "body"}


@pytest.mark.usefixtures("home")
def test_one_source_has_one_epoch_and_plain_text_needs_no_template() -> None:
    data = load(pages_alone())
    assert len(data.train) == 3 and not data.eval
    assert epoch_metrics(data.order, 6) == {"epoch": 2.0}
    with pytest.raises(ConfigError, match="brings no chat template"):
        load(
            {"pages": pages_alone(), "sums": {"path": "sums.jsonl", "prompt": "q", "response": "a"}}
        )


@pytest.mark.usefixtures("home")
def test_a_step_that_draws_more_rows_than_there_are_gives_a_warning() -> None:
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    order = load({"sums": sums, "pages": pages_alone()}, chat_template="none").order
    assert list(repeat_warnings(order, 6)) == []
    [warning] = repeat_warnings(order, 8)
    assert re.search(r"data\.train\.pages .*3 usable rows.* draws 4 ", warning)


@pytest.mark.parametrize("phases", [("data",), ("data", "load"), ("load", "sync")])
@pytest.mark.usefixtures("home")
def test_ctrl_c_ends_loading_at_once(phases: tuple[TimedPhase, ...]) -> None:
    *before, last = phases
    with (
        pytest.raises(Interrupted, match="before the first step of 1"),
        open_session(spec_of(sft(pages_alone())), Planned()) as session,
    ):
        for phase in before:
            with session.phase(phase):
                pass
        with session.phase(last):
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")


@pytest.mark.usefixtures("home")
def test_ctrl_c_lets_a_step_end() -> None:
    """This includes its sync, which is no longer part of loading."""
    phases: tuple[TimedPhase, ...] = ("load", "rollout", "sync")
    with open_session(spec_of(sft(pages_alone())), Planned()) as session:
        for phase in phases:
            with session.phase(phase):
                pass
        with session.phase("sync"):
            signal.raise_signal(signal.SIGINT)
        assert session.stop.requested
        with session.phase("eval"), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("home")
def test_a_run_says_what_it_does_until_it_ends() -> None:
    with open_session(spec_of(sft(pages_alone())), Planned()) as session:
        path = session.directory.now_path
        for phase in ("load", "train_actor"):
            with session.phase(phase):
                now = read_current_phase(path)
                assert now is not None and (now.step, now.steps, now.phase) == (1, 1, phase)
                assert not now.has_ended
    assert not path.exists()


def test_a_token_that_the_model_has_no_row_for_is_refused(home: Path) -> None:
    """The digits are the arithmetic tokenizer's first tokens; `=` and the end come after them."""
    file = home / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 10}))
    with pytest.raises(ConfigError, match=r"token 1\d \(`.+`\).* below 10 "):
        load(pages_alone())


@pytest.mark.usefixtures("home")
def test_rows_that_are_cut_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The samples have 7 tokens. Documents are divided, not cut."""
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    train = {"sums": sums, "pages": pages_alone()}
    load(train, chat_template="none", max_tokens=6, over_long="truncate", eval=sums)
    reason = "to data.max_tokens: 6, as data.over_long: truncate says"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cut ")]
    assert lines == [f"cut 6 rows of data.train.sums {reason}", f"cut 6 rows of data.eval {reason}"]
    load(train, chat_template="none", max_tokens=8, over_long="truncate")
    assert "cut " not in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_rows_whose_reasoning_is_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    forgets = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    )
    said = {"role": "assistant", "content": "<think>79</think>2", "train": False}
    user, last = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    rows = [[user, last], [user, said, user, last], [user, said, user, last]]
    Path("turns.jsonl").write_text("".join(json.dumps({"t": row}) + "\n" for row in rows))
    train = {"path": "turns.jsonl", "messages": "t"}
    load(train, chat_template=forgets, max_tokens=200)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "reasoning" in line]
    assert re.search(r" 2 rows of data\.train\b.* turns\.jsonl:2: ", line)


def asking(*answers: str, **data: Any) -> RlConfig:
    """Return settings with these references to learn from, and to evaluate with."""
    rows = [{"q": "1+1=", "r": answer} for answer in answers]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"path": "asked.jsonl", "prompt": "q", "reference": "r"}
    config = ppo({"asked": asked}, prompts=1, eval=asked, **data)
    return config.model_copy(update={"rewards": {"right": RewardConfig(name="math_answer")}})


def load_asked(config: RlConfig) -> RlData:
    with open_session(spec_of(config), Planned()) as session:
        rule = build_rule("right", config.rewards["right"])
        return load_prompt_data(session, spec_of(config), ReferenceCheck(rule.check_reference, []))


def test_references_that_are_none_are_bad_rows(home: Path) -> None:
    data = load_asked(asking("\\frac43", "n/a", "6 - 5i", on_bad_row="skip"))
    assert [prompt.reference for prompt in data.train] == ["\\frac43", "6 - 5i"]
    loss_mask, held_out = (home / "run" / "bad_rows.jsonl").read_text().splitlines()
    assert loss_mask == held_out
    bad = json.loads(loss_mask)
    assert (bad["file"], bad["line"], bad["field"]) == ("asked.jsonl", 2, "r")
    assert "for the reward 'right': 'n/a'" in bad["problem"]
    for read in (load_asked, lambda config: measure(spec_of(config), home)):
        with pytest.raises(DataError, match=r"1 of 2 rows .*\n  asked\.jsonl:2: r: .*'n/a'"):
            read(asking("1", "n/a"))


@pytest.mark.usefixtures("home")
def test_an_evaluation_needs_references_too(tmp_path: Path) -> None:
    config = asking("1")
    without = config.data.eval_sources()["data.eval"].model_copy(update={"reference": None})
    data = config.data.model_copy(update={"eval": without})
    with pytest.raises(ConfigError, match=r"data\.eval\.reference\n.*rewards\.right would compare"):
        measure(spec_of(config.model_copy(update={"data": data})), tmp_path)


@pytest.mark.usefixtures("home")
def test_ctrl_c_ends_the_checking_of_references() -> None:
    """It stops before the next reference; there is one batch of rows."""
    checked = []

    def check(reference: object) -> None:
        checked.append(reference)
        os.kill(os.getpid(), signal.SIGINT)

    config = asking("1", "2", "3")
    with (
        pytest.raises(Interrupted, match="stopped before the first step of 1"),
        open_session(spec_of(config), Planned()) as session,
    ):
        load_prompt_data(session, spec_of(config), ReferenceCheck(check, []))
    assert checked == ["1"]


def ppo(train: dict[str, Any], prompts: int, **data: Any) -> RlConfig:
    return RlConfig.model_validate(
        {
            "run": {"directory": "run", "steps": 1, "tensorboard": False, "resume": "auto"},
            "cluster": {"where": "local"},
            "data": {"train": train, "chat_template": "none", "max_tokens": 8, **data},
            "batch": {"prompts": prompts},
            "actor": {"model": {"path": "model"}},
            "critic": {"model": {"path": "model"}},
            "rewards": {"length": {"name": "length"}},
            "rollout": {"transformers": {}, "sampling": {"max_new_tokens": 4}},
        }
    )


def load_prompts(prompts: int, weight: float) -> RlData:
    (few, many) = ({"path": "sums.jsonl", "prompt": "q", "limit": n} for n in (2, 6))
    config = ppo({"few": few | {"weight": weight}, "many": many}, prompts)
    with open_session(spec_of(config), Planned()) as session:
        return load_prompt_data(session, spec_of(config))


@pytest.mark.usefixtures("home")
def test_prompts_of_a_mixture_have_numbers_of_their_own() -> None:
    """Responses are grouped by these numbers."""
    data = load_prompts(prompts=4, weight=1.0)
    assert [prompt.index for prompt in data.train] == list(range(8))


@pytest.mark.usefixtures("home")
def test_a_source_with_too_few_prompts_for_a_step_is_named() -> None:
    load_prompts(prompts=6, weight=0.5)
    with pytest.raises(ConfigError, match=r"data\.train\.few .* 2 usable .*\bweight\b"):
        load_prompts(prompts=6, weight=1.0)


@pytest.mark.usefixtures("home")
def test_prompts_of_a_source_come_by_their_numbers_and_those_of_another_as_they_are() -> None:
    rows = [{"q": f"{n}+1=", "level": n} for n in (3, 1, 2)]
    Path("levels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    levels = {"path": "levels.jsonl", "prompt": "q", "order_by": "level"}
    plain = {"path": "sums.jsonl", "prompt": "q", "limit": 3}
    config = ppo({"plain": plain, "levels": levels}, 2, shuffle=False)
    with open_session(spec_of(config), Planned()) as session:
        data = load_prompt_data(session, spec_of(config))
    texts = [data.train[row].text for row in data.order.indices(0, 8)]
    assert texts[0::2] == ["0+1=", "1+1=", "2+1=", "0+1="]
    assert texts[1::2] == ["1+1=", "2+1=", "3+1=", "1+1="]
    edited = [replace(prompt, order_by=9.0) for prompt in data.train[3:]]
    assert fingerprint(edited) != data.sources["data.train.levels"].content


def test_only_what_is_learned_from_is_ordered() -> None:
    levels = {"path": "levels.jsonl", "prompt": "q", "order_by": "level"}
    with pytest.raises(ConfigError) as caught:
        check_agreement(spec_of(ppo(levels, 2, eval=levels)))
    message = str(caught.value)
    assert "data.eval.order_by: level" in message and "data.train" not in message


def test_a_mixture_of_a_stream_and_of_rows_that_are_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws come in turns; the stream repeats nothing before its end, and counts no epochs."""
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 4)
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    train = {"stream": {**sums, "streaming": True, "weight": 2}, "kept": sums}
    data = load(train, chat_template="none", max_tokens=16)
    draws = [data.train[int(i)].tokens.tobytes() for i in data.order.indices(0, 9)]
    whole = {sample.tokens.tobytes() for sample in load(sums, chat_template="none").train}
    streamed_draws = [draws[i] for i in range(9) if data.order.indices(i, 1)[0] < 2**40]
    assert len(streamed_draws) == 6 and set(streamed_draws) == whole
    assert epoch_metrics(data.order, 9) == {"epoch/kept": 3 / 6}
    assert not [*repeat_warnings(data.order, 3)]
    again = load(train, chat_template="none", max_tokens=16)
    assert [again.train[int(i)].tokens.tobytes() for i in again.order.indices(0, 9)] == draws


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"eval": {"streaming": True}}}, "are all evaluated"),
        ({"run": {"steps": None, "epochs": 1}}, "run.epochs is given"),
    ],
)
def test_a_stream_that_must_be_known_as_a_whole_is_refused(
    home: Path, changes: dict[str, Any], reason: str
) -> None:
    sums = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    values = sft({**sums, "streaming": True}).model_dump(exclude_unset=True)
    held_out = {"eval": {**sums, **changes.get("data", {}).get("eval", {})}}
    values["data"] |= held_out
    values["run"] |= {"eval_every": 1, **changes.get("run", {})}
    with pytest.raises(SettingsConflict, match=reason):
        check_agreement(spec_of(SftConfig.model_validate(values)))


def test_prompts_are_not_streamed(home: Path) -> None:
    config = ppo({"path": "sums.jsonl", "prompt": "q", "streaming": True}, 2)
    with pytest.raises(SettingsConflict, match="looks at all rows"):
        check_agreement(spec_of(config))
