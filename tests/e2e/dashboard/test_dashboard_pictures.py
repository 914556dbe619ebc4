"""The views as people see them, light and dark; with POSTTRAIN_TEST_IMAGES=FOLDER the pictures stay there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VIEWS = [
    ("jobs", "#/jobs", "stars-lora16"), ("charts", "#/jobs/{live}", "Throughput"), ("log", "#/jobs/{live}/log", "step 140"),
    ("new", "#/new", "All other knobs"), ("devices", "#/devices", "torch 2.13.0"), ("spec", "#/jobs/{live}/spec", "default"),
    ("checkpoints", "#/jobs/{done}/checkpoints", "step-000300"), ("events", "#/jobs/{done}/events", "queued"), ("compare", "#/compare?jobs={done},{live}", "What differs"),
]  # fmt: skip
ROW = '{"messages": [{"role": "user", "content": "Which star is that?"}, {"role": "assistant", "content": "Vega."}]}'

DRAWN = "figure canvas, .lines > div, tbody tr, .events li, .box.good"


def fill_in(page):
    page.get_by_label("name", exact=True).fill("stars-dora")
    page.get_by_label("LoRA adapter").check()
    page.get_by_text("Write rows here").first.click()
    page.locator("textarea").first.fill(f"{ROW}\n{ROW}\n")
    page.locator("textarea").first.blur()
    page.get_by_text("Every row is good.").wait_for()
    page.get_by_role("button", name="Estimate").click()
    page.get_by_text("This fits into memory.").wait_for()
    page.evaluate("scrollTo(0, 0)")


@pytest.mark.parametrize(("theme", "width", "count"), [("light", 1280, len(VIEWS)), ("dark", 1280, 3), ("light", 390, 5)])
def test_every_view_fits_its_window(page, world, theme, width, count, tmp_path):
    ids = {name: getattr(world, name).job_uuid for name in ("live", "done")}
    folder = Path(os.environ.get("POSTTRAIN_TEST_IMAGES", tmp_path))
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 860})
    for name, hash_, text in VIEWS[:count]:
        for loop in world.runtime.loops:
            loop.round()
        page.goto(f"{world.address}/{hash_.format(**ids)}")
        page.get_by_text(text).first.wait_for()
        if name == "new":
            fill_in(page)
        page.locator(DRAWN).first.wait_for()
        page.screenshot(path=folder / f"{name}-{theme}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than its window"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(14, 16, 21)") == (theme == "dark")
