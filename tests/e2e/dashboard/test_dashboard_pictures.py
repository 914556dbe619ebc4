"""The views as people see them, light and dark; with POSTTRAIN_TEST_IMAGES=docs/images the pictures of the documentation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VIEWS = [
    ("jobs", "#/jobs", "stars-lora16"), ("charts", "#/jobs/{live}", "Throughput"), ("log", "#/jobs/{live}/log", "step 140"),
    ("new", "#/new", "All other knobs"), ("devices", "#/devices", "In use"), ("spec", "#/jobs/{live}/spec", "default"),
    ("checkpoints", "#/jobs/{done}/checkpoints", "step-000300"), ("events", "#/jobs/{done}/events", "queued"), ("compare", "#/compare?jobs={done},{live}", "What differs"),
]  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_its_window(page, world, theme, tmp_path):
    ids = {name: getattr(world, name).job_uuid for name in ("live", "done")}
    folder = Path(os.environ.get("POSTTRAIN_TEST_IMAGES", tmp_path))
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    for loop in world.runtime.loops:
        loop.round()
    for name, hash_, text in VIEWS:
        page.goto(f"{world.address}/{hash_.format(**ids)}")
        page.get_by_text(text).first.wait_for()
        page.wait_for_timeout(700)
        page.screenshot(path=folder / f"{name}-{theme}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than its window"
