"""The page of a plan in a real Chromium: a change moves the line and the verdict, and stays in the
address; what is copied plans the same; what is refused says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
from pages import Page, expect

from plimsoll.cli import main
from plimsoll.commands.report import answer_plan
from plimsoll.page.serve import PLAN, render_page

pytestmark = pages.needs_chromium
SCENARIO = Path(__file__).parents[2] / "examples" / "scenarios" / "5_orz_1p5b.yaml"
READY = "#memory .place"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with pages.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    path = str(SCENARIO)
    with pages.served(
        render_page(path, None, PLAN), lambda n, q: answer_plan(path, [], n, q)
    ) as found:
        yield found


def line_of(found: Page) -> float:
    """Return how far to the right the load line of the first kind of card is; pixels."""
    box = found.locator("#memory .load-line").first.bounding_box()
    assert box is not None
    return float(box["x"])


def test_a_change_moves_the_line_and_the_verdict(address: str, chromium: Any) -> None:
    with pages.opened(chromium, address, READY) as found:
        verdict, bar = found.get_by_role("status"), found.locator("#memory .bar").first
        expect(verdict).to_have_text("does not fit: 105 GB")
        expect(found.locator("#problems")).to_contain_text("vllm-share-beside-training")
        before = line_of(found)
        found.get_by_label("memory_share", exact=True).fill("0.5")
        expect(verdict).to_have_text("fits: 71 GB")
        expect(found.locator("#header")).to_contain_text("as written: does not fit")
        expect(found.locator("#problems")).to_have_text("ProblemsNone.")
        assert line_of(found) > before
        found.get_by_label("memory_share", exact=True).press("ArrowUp")
        expect(found.get_by_label("memory_share", exact=True)).to_have_value("0.55")
        found.get_by_label("raise cluster.ranks").click()
        expect(found.locator("#planned")).to_contain_text("8 ranks")
        found.get_by_text("undo all").click()
        expect(verdict).to_have_text("does not fit: 105 GB")
        assert found.url == address and bar.is_visible()


def test_the_address_keeps_what_was_changed_and_a_copy_plans_the_same(
    address: str, chromium: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pages.opened(chromium, address, READY) as found:
        stage = found.locator("[id='actor.zero.stage']")
        stage.select_option("2")
        found.get_by_label("proposals for cluster.hardware").select_option("4xH200")
        found.locator("#memory").get_by_text("4 x H200").wait_for()
        assert found.url == f"{address}?actor.zero.stage=2&cluster.hardware=4xH200"
        found.locator("#memory details summary").first.press("Enter")
        found.locator("#memory table.items").first.get_by_text("fp32 masters").first.wait_for()
        found.reload()
        found.locator("#memory").get_by_text("4 x H200").wait_for()
        assert stage.input_value() == "2"
        expect(found.locator(".field.changed")).to_have_count(2)
        shown = found.get_by_role("status").inner_text()
        found.context.grant_permissions(["clipboard-read", "clipboard-write"])
        found.locator("#config button").first.click()
        found.get_by_text("copied").wait_for()
        copy = tmp_path / "copy.yaml"
        copy.write_text(found.evaluate("navigator.clipboard.readText()"))
    main(["plan", str(copy), "--json"])
    again = json.loads(capsys.readouterr().out)
    peak = max(one["peak"]["device_bytes"] for one in again["devices"])
    assert shown == f"{again['verdict']}: {peak / 1e9:.0f} GB"


def test_what_fits_is_tried(address: str, chromium: Any) -> None:
    with pages.opened(chromium, address, READY) as found:
        verdict = found.get_by_role("status")
        found.get_by_label("prompts", exact=True).fill("64")
        found.get_by_role("button", name="what fits?").click()
        tries = found.get_by_role("button", name="try it")
        tries.first.wait_for(timeout=60_000)
        for place in range(tries.count()):
            tries.nth(place).click()
            expect(verdict).to_contain_text("fits:")
            expect(verdict).not_to_contain_text("does not")
            changed = found.locator("#answers article").nth(place).locator("li code").first
            key = changed.inner_text().removesuffix(":").removesuffix(": ")
            expect(found.locator(f"[id='{key}']")).to_be_visible()
            assert key in found.url and "batch.prompts=64" in found.url
        found.get_by_text("undo all").click()
        expect(verdict).to_contain_text("does not fit")


def test_a_wrong_value_is_refused_with_the_way_out(address: str, chromium: Any) -> None:
    with pages.opened(chromium, address, READY) as found:
        tokens, told = (
            found.get_by_label("micro_batch_tokens", exact=True),
            found.get_by_role("alert"),
        )
        tokens.fill("<b>many")
        expect(told).to_contain_text("batch.micro_batch_tokens: <b>many")
        expect(told).to_contain_text("It must be: integer >= 1.")
        expect(found.get_by_role("status")).to_have_text("refused")
        expect(found.locator("#memory .place")).to_have_count(2)  # of before, faint
        expect(found.locator("#config")).to_contain_text("Nothing to copy")
        tokens.fill("2048")
        expect(told).to_have_count(0)
        found.get_by_label("zero.parameter_offload").first.select_option("cpu")
        found.locator("[id='actor.zero.stage']").select_option("1")
        expect(told).to_contain_text("[offload-stage]")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_fits_its_window(address: str, chromium: Any, width: int, scheme: str) -> None:
    with pages.opened(chromium, address, READY, color_scheme=scheme) as found:
        found.set_viewport_size({"width": width, "height": 800})
        expect(found.locator("#settings fieldset")).to_have_count(7)
        assert found.evaluate("document.documentElement.scrollWidth") <= width
        found.get_by_label("max_new_tokens", exact=True).focus()
        expect(found.locator("#about")).to_contain_text(
            "max_new_tokens (integer >= 1): The longest"
        )
        found.mouse.wheel(0, 300)
        expect(found.get_by_role("status")).to_be_in_viewport()


def test_a_written_page_shows_the_plan_without_settings(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", str(SCENARIO), "--html", str(file)]) == 3
    with pages.opened(chromium, file.as_uri(), READY) as found:
        expect(found.get_by_role("status")).to_have_text("does not fit: 105 GB")
        expect(found.locator("#problems")).to_contain_text("vllm-share-beside-training")
        assert found.locator("#memory .load-line").count() > 0
        expect(found.locator("#settings, button:not(.copy button)")).to_have_count(0)
