"""The page of runs in a real Chromium: it loads, keeps up with its run, filters, zooms, and shows
what a run wrote as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
from pages import Page, expect

from plimsoll.commands.report import Reader, answer_with, report_run
from plimsoll.page.serve import RUNS, View, join_scripts, render_page
from plimsoll.page.watched import watch_runs
from plimsoll.records import ADVANTAGES, Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row, write_rows
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.phases import CurrentPhase, write_current_phase
from plimsoll.run.readings import Footprint, Line
from plimsoll.run.trajectories import write_trajectories

pytestmark = pages.needs_chromium
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with pages.started() as browser:
        yield browser


@contextmanager
def opened(chromium: Any, address: str, **settings: Any) -> Iterator[Page]:
    with pages.opened(chromium, address, "#config table", **settings) as found:
        yield found


@contextmanager
def served(*paths: Path) -> Iterator[str]:
    """The address of these runs' live page."""
    with Reader(watch_runs(paths)) as reader:
        text = render_page(", ".join(run.name for run in reader.runs), None, RUNS)
        with pages.served(text, answer_with(lambda: reader.runs)) as address:
            yield address


def sampled(number: int, sample: int) -> Trajectory:
    return single_turn(
        prompt=Prompt(number, np.array([1]), f"prompt {number} {ATTACK}", None),
        sample_index=sample,
        response_tokens=np.array([1, 2]),
        sampler_logprobs=np.zeros(2, dtype=np.float32),
        response_text=f"answer {number} {ATTACK}",
        finish_reason="stop",
        weight_version=1,
        rewards=(RewardPart(ATTACK, float(sample), 1.0),),
        group=number,
    )


def write_run(path: Path, steps: int, groups: int = 2, process: str = "local") -> RunDirectory:
    """A run of PPO, with two responses in each group."""
    path.mkdir(exist_ok=True)
    run = RunDirectory(path)
    run.write_config(f'# ppo\nrun: {{steps: 90, directory: "{path}"}}\nname: "{ATTACK}"\n')
    rows = [
        {"step": s, "reward": 1.0 - 1 / s, "kl": 0.1, "entropy": 1.0, ATTACK: 1.0}
        | {"seconds/rollout": 1.0, "seconds/sync": 0.5, "eval/reward": 0.5}
        for s in range(1, steps + 1)
    ]
    write_rows(run.metrics_path, rows)
    held, line = Footprint(5 * 10**9), Line(6 * 10**9, 10**10)
    ledger = [
        LedgerRow(s, "rollout", who, "node 0", held, held, held, line, 1.0)
        for s in range(1, steps + 1)
        for who in (process, "node 0")
    ]
    write_ledger(run.ledger_path, ledger)
    found = [sampled(number, sample) for number in range(groups) for sample in range(2)]
    advantages = np.array([0.5, -0.5], dtype=np.float32)
    scored = [t.add_columns({ADVANTAGES: advantages}) for t in found]
    write_trajectories(run.trajectories_path(steps), steps, scored)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "one", steps=20)


def shown_figures(page: Page) -> list[str]:
    return [text for text in page.locator("figure:visible h3").all_inner_texts() if text]


def test_a_live_page_shows_each_new_step(run: RunDirectory, chromium: Any) -> None:
    with served(run.path) as address, opened(chromium, address) as page:
        header, reward = page.locator("#header"), page.locator("#curves-learning figure").first
        expect(header).to_contain_text("20 of 90")
        expect(reward).to_contain_text("training 0.95")
        expect(page.locator("#curves-learning canvas")).to_have_count(2)
        append_row(run.metrics_path, {"step": 21, "reward": 0.625, "entropy": 9.0})
        write_current_phase(run.now_path, CurrentPhase(22, 90, "train_actor"))
        header.get_by_text("21 of 90").wait_for()
        header.get_by_text("train_actor").wait_for()
        reward.get_by_text("0.625").wait_for()
        header.get_by_text("entropy is 9, healthy is 0.01 to 4").wait_for()
        write_trajectories(run.trajectories_path(21), 21, [sampled(7, 0)])
        page.get_by_text("Step 21: the best responses").wait_for()
        page.get_by_role("button", name="all of group 7").click()
        page.get_by_text("Step 21, group 7").wait_for()


def test_the_last_evaluation_is_told_between_evaluations(tmp_path: Path, chromium: Any) -> None:
    run = RunDirectory(tmp_path)
    run.write_config("# ppo\nrun: {steps: 90}\n")
    interval = {"eval/reward_low": 0.25, "eval/reward_high": 0.75}
    rows = [{"step": step, "reward": 1.0} for step in range(1, 8)]
    rows[3] |= {"eval/reward": 0.5, "eval/alone": 0.125, **interval}
    write_rows(run.metrics_path, rows)
    with served(run.path) as address, opened(chromium, address) as page:
        expect(page.locator("#header")).to_contain_text(
            "held out, step 4:reward 0.5 (0.25 to 0.75)"
        )
        reward = page.locator("#curves-learning figure").first
        expect(reward).to_contain_text("held out 0.5 (step 4)")
        alone = page.locator("#curves-learning figure", has_text="Held out: alone")
        expect(alone).to_contain_text("eval/alone 0.125 (step 4)")
        reward.focus()
        for key in ["ArrowRight"] * 5:
            page.keyboard.press(key)
        expect(reward).to_contain_text("step 5training 1held out 0.5 (step 4)")
        page.keyboard.press("ArrowLeft")
        expect(reward).to_contain_text("step 4training 1held out 0.5")
        for key in ["ArrowLeft"] * 2:
            page.keyboard.press(key)
        expect(reward).to_contain_text("held out –")


@pytest.mark.parametrize(("low", "high", "reach"), [(0.25, 0.75, (90, 150)), (0.5, 0.5, (3, 12))])
def test_a_single_point_has_its_interval(
    low: float, high: float, reach: tuple[int, int], tmp_path: Path, chromium: Any
) -> None:
    """By how many pixels of its colour there are from the highest to the lowest."""
    run = RunDirectory(tmp_path)
    run.write_config("# ppo\nrun: {steps: 90}\n")
    row = {"eval/x": 0.5, "eval/x_low": low, "eval/x_high": high}
    write_rows(run.metrics_path, [{"step": 150, **row}])
    with served(run.path) as address, opened(chromium, address) as page:
        page.locator("#curves-learning canvas").wait_for()
        rows = page.evaluate(
            """() => {
              const canvas = document.querySelector("#curves-learning canvas");
              const [width, height] = [canvas.width, canvas.height];
              const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
              const isBlue = (i) => data[i + 3] > 60 && data[i + 2] - data[i] > 120;
              const found = [...Array(width * height).keys()].filter((i) => isBlue(4 * i));
              return found.map((i) => Math.floor(i / width));
            }"""
        )
        assert reach[0] <= max(rows) - min(rows) <= reach[1]


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0, 2e-7, 4e-7], ["0", "2e-7", "4e-7"]),
        ([0, 0.0000125, 0.000025], ["0", "1.25e-5", "2.5e-5"]),
        ([0, 0.0005, 0.001, 0.0015], ["0", "0.0005", "0.001", "0.0015"]),
        ([0.4601, 0.46012, 0.46014], ["0.4601", "0.46012", "0.46014"]),
        ([0.1, 0.2, 0.1 + 0.2], ["0.1", "0.2", "0.3"]),
        ([0, 50000, 100000], ["0", "50,000", "100,000"]),
        ([-0.5], ["-0.5"]),
    ],
)
def test_ticks_are_told_apart(ticks: list[float], texts: list[str], chromium: Any) -> None:
    page = chromium.new_page()
    modules = join_scripts(View(("dom", "palette", "chart_data")))
    assert page.evaluate(f"(ticks) => {{ {modules}\n return tickTexts(ticks); }}", ticks) == texts
    page.close()


def test_the_console_is_shown_as_it_is_written(run: RunDirectory, chromium: Any) -> None:
    log = run.path / "run.log"
    with served(run.path) as address, opened(chromium, address) as page:
        page.get_by_text("No run.log in the run's directory.").wait_for()
        log.write_text(f"first {ATTACK}\n")
        page.locator("#console pre").get_by_text("first <img").wait_for()
        with log.open("a") as file:
            file.writelines(f"line {i}\n" for i in range(400))
        page.get_by_text("The last 300 lines of run.log.").wait_for()
        shown = page.locator("#console pre")
        assert shown.inner_text().splitlines()[-1] == "line 399"
        unseen = shown.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight")
        assert unseen <= 4


def test_a_thousand_trajectories_are_filtered_and_ordered(tmp_path: Path, chromium: Any) -> None:
    run = write_run(tmp_path / "many", steps=3, groups=500)
    with served(run.path) as address, opened(chromium, address) as page:
        samples = page.locator("#samples")
        samples.get_by_text("500 of 500 groups").wait_for()
        expect(samples.locator(".groups button")).to_have_count(500)
        samples.get_by_label("filter prompts").fill("prompt 49")
        samples.get_by_text("11 of 500 groups").wait_for()
        samples.locator(".groups button", has_text="prompt 497").press("Enter")
        samples.get_by_text("Step 3, group 497").wait_for()
        answers = samples.locator("article pre").all_inner_texts()
        assert answers == [f"answer 497 {ATTACK}"] * 2
        assert samples.locator("article h3").first.inner_text() == "[1] reward 1"


def test_curves_are_filtered_zoomed_and_read_with_the_keyboard(
    run: RunDirectory, chromium: Any
) -> None:
    with served(run.path) as address, opened(chromium, address) as page:
        page.locator("#curves-time canvas").first.wait_for()
        page.get_by_label("filter curves").fill("kl")
        assert shown_figures(page) == ["KL from the reference"]
        page.get_by_label("filter curves").fill("")
        expect(page.locator("#curves-learning figure")).not_to_have_count(1)
        figure = page.locator("#curves-learning figure").first
        figure.focus()
        for key in ("ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        figure.get_by_text("step 2").wait_for()
        figure.get_by_text("training 0.5").wait_for()
        page.keyboard.press("+")
        whole = page.get_by_text("show the whole run")
        whole.wait_for()
        page.keyboard.press("Escape")
        whole.wait_for(state="hidden")
        page.locator("#other summary").press("Enter")
        page.locator("#curves-other canvas").first.wait_for()
        assert ATTACK in shown_figures(page)


def test_two_runs_are_overlaid_and_their_configs_compared(tmp_path: Path, chromium: Any) -> None:
    one, other = write_run(tmp_path / "a", 5), write_run(tmp_path / "b", 9, process="rank 0")
    paths = (one.path, other.path)
    with served(*paths) as address, opened(chromium, address) as page:
        legend = page.locator("#curves-learning figure").first.locator(".keys")
        expect(legend).to_contain_text("a, training 0.8")
        expect(legend).to_contain_text("b, training 0.8889")
        expect(page.locator("#curves-memory .keys")).to_contain_text("b, rank 5")
        keys = page.locator("#config tbody code").all_inner_texts()
        assert keys == ["run.directory"]
        page.get_by_label("only what differs").uncheck()
        assert "name" in page.locator("#config tbody code").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_report_is_the_same_page_without_a_server(
    run: RunDirectory, chromium: Any, width: int, scheme: str
) -> None:
    report_run(run.path)
    address = run.report_path.as_uri()
    with opened(chromium, address, color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.locator("#curves-learning canvas")).to_have_count(2)
        expect(page.locator("#memory .phase")).to_have_count(1)
        expect(page.locator("#memory .phase")).to_contain_text("5 GB measured")
        page.get_by_text("Step 20: the worst responses").wait_for()
        page.locator("#samples .groups button").first.click()
        page.get_by_text("Step 20, group 0").wait_for()
        assert page.locator("img").count() == 0  # none of what the run wrote is markup
        body = page.locator("body").bounding_box()
        assert body is not None and body["width"] <= width
