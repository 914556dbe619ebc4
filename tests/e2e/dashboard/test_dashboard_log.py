"""The log viewer: what a terminal would show, the end of what is written, any place of a long log."""

from __future__ import annotations

import pytest

LINES = 200_000
AT_END = "() => { const box = document.querySelector('.log'); return box.scrollHeight - box.scrollTop - box.clientHeight < 5; }"


@pytest.fixture(scope="module")
def job(world):
    made = world.start(world.submit("long-log", resources={"devices": 1, "priority": 50}))
    yield made
    world.http.post(f"/post_training/jobs/{made.job_uuid}/cancel")


def opened(page, world, job):
    page.goto(f"{world.address}/#/jobs/{job.job_uuid}/log")
    page.locator(".lines > div").last.wait_for()


def test_a_line_is_what_a_terminal_leaves(page, world):
    page.goto(world.address)
    shown = page.evaluate("""async (texts) => {
      const { line, plain } = await import('/dashboard/ansi.js');
      const style = plain();
      return texts.map((text) => line(text, style).map(([piece, how]) => [piece, ...Object.entries(how).filter(([, value]) => value !== null && value !== false).flat()]));
    }""", [
        "plain", "one\r two\rthree", "50%\r100%\r", "windows\r", "\x1b[31mred \x1b[1mbold\x1b[0m plain", "\x1b[38;5;196mx\x1b[48;2;1;2;3my\x1b[0m", "\x1b[32mstays", "on\x1b[m off",
        "\x1b]0;title\x07\x1b[2K\x1b[1Aup", "nul\x00 bell\x07", "\x1b[97mbright\x1b[39m", "", "\x1b[38;5", "<b>&amp;</b>",
    ])  # fmt: skip
    assert shown == [
        [["plain"]], [["three"]], [["100%"]], [["windows"]], [["red ", "fg", 1], ["bold", "fg", 1, "bold", True], [" plain"]],
        [["x", "fg", "rgb(255,0,0)"], ["y", "fg", "rgb(255,0,0)", "bg", "rgb(1,2,3)"]], [["stays", "fg", 2]], [["on", "fg", 2], [" off"]],
        [["up"]], [["nul"], [" bell"]], [["bright", "fg", 15]], [], [["38;5"]], [["<b>&amp;</b>"]],
    ]  # fmt: skip


def test_it_follows_until_somebody_scrolls_up(page, world, job, until):
    world.log(job, b"first\n\x1b[31mred\x1b[0m <b>no markup</b>\n10%\r50%")
    opened(page, world, job)
    lines = page.locator(".lines > div")
    page.get_by_text("50%").wait_for()
    assert lines.all_inner_texts()[-2:] == ["red <b>no markup</b>", "50%"]
    assert page.locator(".lines .a-f1").inner_text() == "red"
    world.log(job, b"\r100%\ndone \xff\xf0\x9f\x8c\x9f\n")
    page.get_by_text("100%").wait_for()
    page.get_by_text("🌟").wait_for()
    assert lines.all_inner_texts()[-2:] == ["100%", "done �🌟"]
    world.log(job, b"".join(b"line %d\n" % n for n in range(3000)))
    page.get_by_text("line 2999").wait_for()
    follow = page.get_by_role("button", name="Follow")
    until(AT_END)
    page.locator(".log").evaluate("box => { box.scrollTop = 200; }")
    until("document.querySelector('.logcard [aria-pressed=false]')")
    world.log(job, b"while reading above\n")
    page.get_by_text("while reading above").wait_for(state="attached")
    assert follow.get_attribute("aria-pressed") == "false"
    assert page.locator(".log").evaluate("box => box.scrollTop") < 400
    follow.click()
    until(AT_END)


def test_any_place_of_a_long_log_is_found(page, world, job, until):
    """Some 11 MB: more than the window and than a piece of the search; what is looked for stands where neither has been."""
    block = b"".join(b"%08d a line of a log that is long, with nothing in it\n" % n for n in range(LINES // 2))
    world.log(job, block + b"NEEDLE in \x1b[36mthe middle\x1b[0m\n" + block + b"the end\n")
    opened(page, world, job)
    page.get_by_text("the end", exact=True).wait_for()
    search = page.get_by_placeholder("Search the whole log")
    search.fill("needle in")
    search.press("Enter")
    hit = page.locator(".lines > .hit")
    hit.wait_for(timeout=30_000)
    assert hit.inner_text() == "NEEDLE in the middle"
    assert page.evaluate("CSS.highlights.get('log-search').size") == 1
    assert page.locator(".lines > div").count() < 25_000, "only a window of it is held"
    assert hit.evaluate("row => { const box = row.closest('.log').getBoundingClientRect(); const at = row.getBoundingClientRect(); return at.top >= box.top && at.bottom <= box.bottom; }")
    page.locator(".log").evaluate("box => { box.scrollTop = 0; }")
    until("document.querySelectorAll('.lines > div').length > 3000")
    page.get_by_role("button", name="Start").click()
    page.get_by_text("first", exact=True).wait_for()
    search.fill("nowhere to be found")
    search.press("Enter")
    page.get_by_text("No match.").wait_for(timeout=30_000)
    search.fill("line 2998")
    search.press("Shift+Enter")
    page.locator(".lines > .hit", has_text="line 2998").wait_for(timeout=30_000)
    page.get_by_role("button", name="End").click()
    page.get_by_text("the end", exact=True).wait_for()
