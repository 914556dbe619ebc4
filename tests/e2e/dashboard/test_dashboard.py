"""What people do on the dashboard, in a real Chromium, against the real routes and use cases."""

from __future__ import annotations

import ast
import json
import re
import tarfile
from pathlib import Path

import pytest

EVIL = "<img src=x onerror=\"document.title='owned'\">"


def row(page, name):
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_list_is_live_and_can_be_filtered_and_searched(page, world):
    page.goto(world.address)
    for name, status in (("stars-lora16", "succeeded"), ("stars-lora64", "running"), ("too-long-rows", "failed"), ("all-weights", "queued")):
        row(page, name).get_by_text(status, exact=True).wait_for()
    assert "out of memory" in row(page, "too-long-rows").inner_text()
    assert "140 / 300" in row(page, "stars-lora64").inner_text()
    page.get_by_role("button", name="Failed").click()
    row(page, "stars-lora16").wait_for(state="detached")
    assert page.get_by_role("row").filter(has_text="too-long-rows").count() == 1
    page.get_by_role("button", name="All").click()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("team=sky lora64")
    row(page, "stars-lora16").wait_for(state="detached")
    row(page, "stars-lora64").wait_for()
    page.reload()  # the address holds filter and words
    row(page, "stars-lora64").wait_for()
    assert row(page, "stars-lora16").count() == 0
    page.get_by_role("searchbox").fill("")
    late = world.submit("just-made")
    row(page, "just-made").get_by_text("queued", exact=True).wait_for()
    world.http.post(f"/post_training/jobs/{late.job_uuid}/cancel")
    row(page, "just-made").get_by_text("cancelled", exact=True).wait_for()
    world.http.delete(f"/post_training/jobs/{late.job_uuid}")


def test_curves_grow_and_can_be_smoothed_scaled_zoomed_and_compared(page, world, until):
    job = world.live
    page.goto(f"{world.address}/#/jobs/{job.job_uuid}")
    loss = page.locator("figure").filter(has=page.get_by_role("heading", name="Loss"))
    loss.get_by_text("validation").wait_for()
    before = loss.locator(".legend b").first.inner_text()
    world.train(job, 141, 141, 300, seed=9, loss=99.0)
    until("([node, old]) => node.textContent !== old", [loss.locator(".legend b").first.element_handle(), before])
    page.get_by_text("Step 141 of 300").wait_for()
    assert "stars-lora64 training: newest" in loss.get_attribute("aria-label")

    picture = "() => { const url = document.querySelector('figure canvas').toDataURL(); return url.length + url.slice(-4000); }"
    differs = f"old => ({picture})() !== old"
    drawn = page.evaluate(picture)
    for change in (lambda: page.get_by_label("Smoothing").fill("0.9"), page.get_by_role("button", name="Log scale").click, lambda: page.get_by_label("Over").select_option("epoch")):
        change()
        until(differs, drawn)
        drawn = page.evaluate(picture)
    box = loss.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 60, steps=4)
    page.mouse.up()
    whole = page.get_by_role("button", name="Whole run")
    whole.wait_for()
    until(differs, drawn)
    whole.click()
    whole.wait_for(state="hidden")
    loss.focus()
    page.keyboard.press("+")
    whole.wait_for()
    page.keyboard.press("0")
    whole.wait_for(state="hidden")
    page.get_by_label("Compare with").select_option(world.done.job_uuid)
    loss.get_by_text("stars-lora16 · training").wait_for()
    assert loss.get_by_text("stars-lora64 · validation").count() == 1
    with page.expect_download() as waiting:
        page.get_by_role("button", name="CSV").click()
    lines = Path(waiting.value.path()).read_text().splitlines()
    assert lines[0].startswith("step,")
    assert len(lines) == 142


def test_verbs_ask_first(page, world):
    job = world.submit("to-be-stopped", resources={"devices": 1, "priority": -5})
    page.goto(f"{world.address}/#/jobs/{job.job_uuid}")
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Cancel").click()
    assert "Cancel this job?" in dialog.inner_text()
    dialog.get_by_role("button", name="Back").click()
    assert world.job(job.job_uuid).state == "queued"
    for verb, state in (("Pause", "paused"), ("Resume", "queued"), ("Cancel", "cancelled"), ("Retry", "queued"), ("Cancel", "cancelled")):
        page.get_by_role("button", name=verb, exact=True).click()
        dialog.get_by_role("button", name=verb, exact=True).click()
        page.locator(".head .pill").get_by_text(state, exact=True).wait_for()
        assert world.job(job.job_uuid).state == state
    page.get_by_role("button", name="Delete").click()
    page.keyboard.press("Escape")  # a no
    assert world.job(job.job_uuid).state == "cancelled"
    page.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    page.get_by_role("heading", name="Jobs").wait_for()
    assert world.http.get(f"/post_training/jobs/{job.job_uuid}").status_code == 404


def test_checkpoints_events_and_the_spec_are_there(page, world, tmp_path):
    base = f"{world.address}/#/jobs/{world.done.job_uuid}"
    page.goto(f"{base}/checkpoints")
    newest = page.get_by_role("row").filter(has_text="step-000300")
    newest.get_by_text("best").wait_for()
    with page.expect_download() as waiting:
        newest.get_by_role("button", name="Download").click()
    with tarfile.open(waiting.value.path()) as tar:
        assert {Path(name).name for name in tar.getnames()} >= {"adapter_config.json", "adapter_model.safetensors"}
    page.goto(f"{base}/events")
    page.get_by_text("training is complete after 300 steps").wait_for()
    page.goto(f"{base}/spec")
    given = page.get_by_role("row").filter(has_text="training.lora.rank")
    assert given.inner_text().split() == ["training.lora.rank", "16", "set"]
    assert page.get_by_role("row").filter(has_text="training.num_epochs").inner_text().split() == ["training.num_epochs", "1", "default"]
    page.get_by_label("Only what was set").check()
    page.get_by_role("row").filter(has_text="training.num_epochs").wait_for(state="detached")
    page.goto(f"{world.address}/#/jobs/{world.broken.job_uuid}")
    assert "no memory left for the logits" in page.get_by_role("alert").inner_text()


def test_a_new_job_is_checked_line_by_line_estimated_and_started(page, world, tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps(good), '{"messages": []}', "no JSON at all", json.dumps(good)]) + "\n")
    page.goto(f"{world.address}/#/new")
    page.get_by_label("name", exact=True).fill("made-in-a-browser")
    page.locator("input[type=file]").first.set_input_files(rows)
    report = page.locator(".report").first
    report.get_by_text("2 rows are bad").wait_for()
    assert [cell for cell in report.get_by_role("cell").all_inner_texts() if cell.isdigit()] == ["2", "3"]
    rows.write_text((json.dumps(good) + "\n") * 8)
    page.locator("input[type=file]").first.set_input_files(rows)
    report.get_by_text("Every row is good.").wait_for()
    page.get_by_label("LoRA adapter").check()
    page.get_by_label("num epochs").fill("0")
    page.get_by_role("button", name="Estimate").click()
    page.locator("[data-path='training.num_epochs'] .fault").get_by_text("greater than or equal to 1").wait_for()
    page.get_by_label("num epochs").fill("2")
    page.get_by_role("button", name="Estimate").click()
    page.get_by_text("This fits into memory.").wait_for()
    side = page.locator("aside").inner_text()
    assert "1,430,000" in side
    assert "99.8 % full (58.3 % with padding)" in side
    assert "as fast as stars-lora64" in side
    shown = page.get_by_label("curl").inner_text()
    body = json.loads(re.search(r"--json '(.*)'", shown, re.DOTALL)[1])
    code = page.get_by_label("Python").inner_text()
    assert ast.literal_eval(re.search(r"create_job\((.*?)\)\n", code, re.DOTALL)[1]) == body
    page.get_by_role("button", name="Start the job").click()
    page.get_by_role("heading", name="made-in-a-browser").wait_for()
    job = world.job(page.url.rsplit("/", 1)[-1])
    assert job.spec["asked"] == {key: value for key, value in body.items() if key != "dataset"}
    assert (job.spec["training"]["num_epochs"], job.spec["training"]["lora"]["rank"]) == (2, 16)
    page.get_by_role("link", name="New from this").click()
    page.locator("aside").get_by_text('"num_epochs": 2').first.wait_for()
    world.http.post(f"/post_training/jobs/{job.job_uuid}/cancel")


def test_every_field_of_the_contract_is_in_the_form(page, world):
    page.goto(f"{world.address}/#/new")
    page.get_by_text("All other knobs").wait_for()
    shown = set(page.eval_on_selector_all("[data-path]", "all => all.map((one) => one.dataset.path)"))
    schemas = world.http.get("/openapi.json").json()["components"]["schemas"]
    other = {"lora": "adapter", "method": "method", "loggers": "loggers", "validation_split": "validation_split", "save_every_steps": "checkpoints.every_steps",
             "save_every_epoch": "checkpoints.every_epoch", "keep_last": "checkpoints.keep_last", "keep_best": "checkpoints.keep_best", "best_metric": "checkpoints.metric"}  # fmt: skip
    assert {name for name in schemas["JobRequest"]["properties"] if name not in ("dataset", "validation_dataset", "training")} <= shown
    assert {other.get(name, f"training.{name}") for name in schemas["TrainingKnobs"]["properties"]} <= shown


def test_words_of_jobs_stay_words(page, world):
    job = world.submit(EVIL, metadata={EVIL[:60]: EVIL})
    page.goto(world.address)
    page.get_by_role("link", name=EVIL, exact=True).click()
    page.get_by_role("heading", name=EVIL).wait_for()
    world.http.post(f"/post_training/jobs/{job.job_uuid}/cancel")
    page.get_by_role("button", name="Delete").wait_for()
    assert page.locator("main img").count() == 0
    assert "owned" not in page.title().replace(EVIL, "")
    world.http.delete(f"/post_training/jobs/{job.job_uuid}")


def test_a_key_is_asked_for_and_shows_its_owners_jobs_only(page, make_world):
    from posttrain_service.domain.keys import make_key

    world = make_world()
    keys = {}
    for owner in ("ann", "bob"):
        key, keys[owner] = make_key(owner, "submit", 0.0)
        world.runtime.store.keys.insert(key)
    for owner, text in keys.items():
        body = {"model": "SmolLM2-135M-Instruct", "name": f"{owner}s-job", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}
        assert world.http.post("/post_training/jobs", json=body, headers={"authorization": f"Bearer {text}"}).status_code == 201
    page.add_init_script("delete window.showSaveFilePicker")  # a window of the system's, which nobody here could answer
    page.goto(world.address)
    dialog = page.get_by_role("dialog")
    assert "This server needs a key" in dialog.inner_text()
    page.get_by_label("API key", exact=True).last.fill("pt_wrong")
    page.keyboard.press("Enter")
    dialog.get_by_text("This key is not good").wait_for()
    page.get_by_label("API key", exact=True).last.fill(keys["ann"])
    page.keyboard.press("Enter")
    page.get_by_role("link", name="anns-job").click()
    page.get_by_role("heading", name="anns-job").wait_for()
    page.goto(f"{world.address}/#/jobs")
    page.get_by_role("link", name="anns-job").wait_for()
    assert page.get_by_role("row").count() == 2, "the head, and ann's job"
    job = next(job for job in world.runtime.services.jobs.page().data if job.job.name == "anns-job").job
    world.start(job)
    world.checkpoint(job, 10)
    page.goto(f"{world.address}/#/jobs/{job.job_uuid}/checkpoints")
    with page.expect_download() as waiting:  # a link would carry no key
        page.get_by_role("button", name="Download").click()
    assert tarfile.is_tarfile(waiting.value.path())
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    page.get_by_text("This server needs a key").wait_for()
    assert keys["ann"] not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")


def test_a_server_that_goes_away_is_told_and_found_again(page, world):
    page.goto(world.address)
    row(page, "stars-lora16").wait_for()
    page.context.set_offline(True)
    page.get_by_text("The server does not answer.").wait_for()
    assert row(page, "stars-lora16").count() == 1, "what is known stays"
    page.context.set_offline(False)
    page.get_by_text("The server does not answer.").wait_for(state="detached")


def test_behind_a_prefix_everything_is_found(page, make_world):
    world = make_world(root_path="/train")
    job = world.submit("behind-a-proxy")
    page.goto(world.address)
    page.get_by_role("link", name="behind-a-proxy").click()
    page.get_by_role("heading", name="behind-a-proxy").wait_for()
    assert page.url.startswith(f"{world.address}/#/jobs/{job.job_uuid}") or page.url.startswith(f"{world.address}#/jobs/")
    page.get_by_role("link", name="New job").click()
    page.get_by_label("curl").get_by_text("/train/post_training/jobs").wait_for()


def test_everything_that_can_be_used_has_a_name(page, world):
    bare = """() => [...document.querySelectorAll('button, a, input, select, textarea, [role=progressbar], figure[tabindex]')].filter((one) => {
      const label = one.labels?.length ? [...one.labels].map((each) => each.textContent).join('') : '';
      return !(one.getAttribute('aria-label') || label || one.textContent || one.title).trim();
    }).map((one) => one.outerHTML.slice(0, 120))"""
    for hash_, text in (("#/jobs", "stars-lora16"), (f"#/jobs/{world.live.job_uuid}", "Throughput"), (f"#/jobs/{world.live.job_uuid}/log", "INFO"), ("#/new", "All other knobs"), ("#/devices", "In use")):
        page.goto(f"{world.address}/{hash_}")
        page.get_by_text(text).first.wait_for()
        assert page.evaluate(bare) == []
        assert page.locator("h1").count() == 1
    page.keyboard.press("t")
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == theme


@pytest.mark.parametrize("way", ["keyboard", "link"])
def test_the_content_can_be_skipped_to(page, world, way):
    page.goto(world.address)
    page.get_by_text("stars-lora16").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("d" if way == "keyboard" else "Tab")
    if way == "keyboard":
        page.get_by_role("heading", name="Devices and queue").wait_for()
