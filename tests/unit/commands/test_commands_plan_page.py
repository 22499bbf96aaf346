"""`plimsoll plan --open`: what its page is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from told_problems import read_problems

from plimsoll.cli import main
from plimsoll.commands.report import answer_plan
from plimsoll.errors import ConfigError
from plimsoll.machine.guard import Guard
from plimsoll.page.serve import PLAN, make_app, render_page
from plimsoll.run.numbers import gigabytes_text

SCENARIO = Path(__file__).parents[3] / "examples" / "scenarios" / "5_orz_1p5b.yaml"
HALF = {"rollout.vllm.memory_share": "0.5"}
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ppo.yaml"
    path.write_text(SCENARIO.read_text())
    return str(path)


def planned(capsys: Captured, *words: str) -> dict[str, Any]:
    """Return what `plimsoll plan` says in JSON."""
    main(["plan", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_has_the_figures_of_the_command(config: str, capsys: Captured) -> None:
    found, values = answer_plan(config, [], "plan", {}), planned(capsys, config)
    cards, host = found["plan"]["places"]
    assert found["plan"]["verdict"] == values["verdict"] == "does not fit"
    assert cards["capacity"] == values["devices"][0]["capacity_bytes"]
    phases = {one["name"]: sum(i["bytes"] for i in one["predicted"]) for one in cards["phases"]}
    peak = values["devices"][0]["peak"]
    assert phases[peak["phase"]] == max(phases.values()) == peak["device_bytes"]
    assert found["plan"]["peaks"] == {
        **{"card": peak["device_bytes"], "host": values["hosts"][0]["peak"]["bytes"]}
    }
    over = gigabytes_text(peak["device_bytes"] - cards["capacity"])
    assert f"in train_actor (reduce), {over} over the load line" in cards["says"]
    assert found["plan"]["says"] == f"{cards['name']}: {cards['says']}."
    assert (cards["verdict"], host["verdict"]) == ("does not fit", "fits")
    assert [one["code"] for one in found["plan"]["problems"]] == ["vllm-share-beside-training"]
    assert found["before"] == {"verdict": "does not fit", "peaks": found["plan"]["peaks"]}


def test_the_band_is_of_all_but_what_vllm_was_given(config: str) -> None:
    cards, _ = answer_plan(config, [], "plan", HALF)["plan"]["places"]
    for phase in cards["phases"]:
        sizes = {True: 0, False: 0}
        for item in phase["predicted"]:
            sizes[item["role"] == "rollout"] += item["bytes"]
        # the allocator's gap is no item of the rollout, and nor is it of what vLLM was given
        assert phase["likely"] == pytest.approx(1.1 * sizes[False] + sizes[True], abs=2)


@pytest.mark.parametrize(
    "changes",
    [
        HALF,
        {"rollout.vllm.sleep_level": "1", "rollout.vllm.memory_share": "0.7"},
        {"actor.adapter.rank": "16", "reference.zero.stage": "3", "cluster.host_memory": ""},
        {"cluster.hardware": "2x24GB", "cluster.ranks": "2", "batch.micro_batch_tokens": "1024"},
    ],
)
def test_what_is_copied_has_the_plan_that_is_shown(
    config: str, tmp_path: Path, changes: dict[str, str], capsys: Captured
) -> None:
    flags = ["--cluster.nodes", "1"]
    found = answer_plan(config, flags, "plan", changes)
    assert found["refusal"] is None
    text, command = (one["text"] for one in found["copies"])
    assert text.startswith(SCENARIO.read_text().partition("\n")[0])
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    values = planned(capsys, str(copy))
    assert found["plan"]["verdict"] == values["verdict"]
    assert found["plan"]["peaks"]["card"] == max(
        one["peak"]["device_bytes"] for one in values["devices"]
    )
    again = planned(capsys, *command.split()[2:])
    assert [one["peak"] for one in again["devices"]] == [o["peak"] for o in values["devices"]]


def test_a_change_that_the_config_check_refuses_cannot_be_copied(config: str) -> None:
    changes = {"rollout.vllm.memory_share": "5", "actor.zero.parameter_offload": "cpu"}
    found = answer_plan(config, [], "plan", changes)
    assert (found["plan"], found["copies"]) == (None, [])
    [share] = read_problems(found["refusal"])
    assert (share.key, share.what) == ("rollout.vllm.memory_share", "5")
    assert "> 0 and <= 1" in share.why
    flags = ["--actor.zero.stage=2"]
    [conflict] = read_problems(answer_plan(config, flags, "plan", {**changes, **HALF})["refusal"])
    assert conflict.code == "offload-stage" and "actor.zero.stage: 3" in conflict.fix
    unknown = answer_plan(config, [], "plan", {"cluster.hardware": "4xH99"})["refusal"]
    assert "'H99'" in unknown
    many = answer_plan(config, [], "plan", {"cluster.ranks": "9" * 12})["refusal"]
    assert "100,000" in many
    assert len(found["controls"]) > 30 and found["before"] is not None


def test_answers_of_the_advice_are_changes_that_the_page_can_make(
    capsys: Captured,
) -> None:
    """Each, put over what is changed already, has the plan that it states."""
    config = str(SCENARIO.parent / "4_qwen2_7b_4090.yaml")
    changes = {"cluster.host_memory": "300GB"}
    found = answer_plan(config, [], "fits", changes)
    assert not found["fits"] and len(found["answers"]) >= 2
    for one in found["answers"]:
        made = changes | {change["key"]: change["after"] for change in one["changes"]}
        tried = answer_plan(config, [], "plan", made)
        assert tried["refusal"] is None, one
        assert (tried["plan"]["verdict"], tried["plan"]["peaks"]) == (one["verdict"], one["peaks"])
        assert {change["key"] for change in one["changes"]} <= {
            control["key"] for control in tried["controls"]
        }
    values = planned(capsys, config, "--cluster.host_memory", "300GB", "--suggest")
    assert found["answers"][0]["costs"] == values["suggestions"][0]["costs"]
    kinds = [one["kind"] for one in found["answers"]]
    assert kinds == ["same learning", "adapters", "more machines"]


def test_an_answer_may_change_what_has_no_field_but_nothing_may_name_a_file(config: str) -> None:
    changes = {"actor.zero.gradient_dtype": "bfloat16", "actor.model.head_chunk": "64"}
    found = answer_plan(config, [], "plan", changes)
    assert found["refusal"] is None
    further = [one for one in found["controls"] if one["group"] == "other settings"]
    assert [one["key"] for one in further] == [*changes]
    assert "float32" in further[0]["choices"]
    for key in ("actor.model.path", "data.train.path", "run.directory", "rewards", "no.such.key"):
        refusal = answer_plan(config, [], "plan", {key: "/etc/hostname"})["refusal"]
        assert f"{key} cannot be changed here" in refusal
        with pytest.raises(ConfigError, match="cannot be changed here"):
            answer_plan(config, [], "fits", {key: "/etc/hostname"})


def test_a_file_that_was_edited_is_planned_as_it_is(config: str) -> None:
    path = Path(config)
    path.write_text(path.read_text().replace("memory_share: 0.9", "memory_share: 0.5"))
    assert answer_plan(config, [], "plan", {})["plan"]["verdict"] == "fits"
    path.write_text(path.read_text().replace("memory_share: 0.5", "memory_share: x"))
    with pytest.raises(ConfigError, match=r"ppo\.yaml:\d+"):
        answer_plan(config, [], "plan", {})
    with pytest.raises(ConfigError, match="There is no 'progress'"):
        answer_plan(config, [], "progress", {})


def test_a_layout_that_cannot_be_edited_has_the_command_alone(config: str) -> None:
    path = Path(config)
    path.write_text(
        path.read_text().replace(
            "  vllm: {memory_share: 0.9}", "  vllm:\n    ? memory_share\n    : 0.9"
        )
    )
    found = answer_plan(config, [], "plan", {"rollout.vllm.sleep_level": "2"})
    assert found["refusal"] is None
    (command,) = found["copies"]
    assert command["text"] == f"plimsoll plan {config} --rollout.vllm.sleep_level=2"


def test_only_who_knows_the_token_is_answered(config: str) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    text = render_page("<plan>", None, PLAN)
    guard = Guard("word", "127.0.0.1")
    app = make_app(text, lambda n, q: answer_plan(config, [], n, q), guard)
    client = testclient.TestClient(app, "http://localhost:8765")
    assert "Plimsoll: &lt;plan&gt;" in client.get("/word/").text
    asked = client.get("/word/data/plan", params=HALF)
    assert asked.status_code == 200 and asked.json()["plan"]["verdict"] == "fits"
    assert client.get("/word/data/other").status_code == 404
    for path in ("/", "/other/", "/other/data/plan"):
        assert client.get(path).status_code == 404, path
    assert client.get("/word/", headers={"Host": "evil.example:8765"}).status_code == 404


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "0"], "of the page that --open serves"),
        (["--host", "127.0.0.1"], "of the page that --open serves"),
        (["--open", "--json", "--suggest"], "without --json and --suggest"),
        (["--open", "--actor.zero.stage", "7"], "actor.zero.stage: 7"),
        (["--open", "--host", "192.0.2.1", "--port", "9"], "The server cannot use 192.0.2.1:9: "),
        (["--open", "--port", "70000"], "port must be 0-65535"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    config: str, words: list[str], said: str, capsys: Captured
) -> None:
    pytest.importorskip("uvicorn")
    assert main(["plan", config, *words]) == 2
    assert said in capsys.readouterr().err
