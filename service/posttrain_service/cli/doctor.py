"""`posttrain doctor`: what is wrong on this machine, and why jobs wait."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain_service.cli.common import fail, sentences, show_json
from posttrain_service.cli.db import StorageOption, UrlOption, database_file, opened
from posttrain_service.store.upgrade import is_current
from posttrain_service.work.doctor import Doctor, Finding
from posttrain_service.work.inventory import devices


def doctor(
    job_uuid: Annotated[str | None, typer.Argument(metavar="JOB_UUID", help="Say only what concerns this job.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Look for faults of the set-up, for what crashes left behind, and say why jobs aren't running. Changes nothing.

    Exit code 1 when something doesn't work.
    """
    with sentences():
        path = database_file(storage_dir, database_url)
        if path is not None and not path.exists():
            fail(f"no service has been here: there is no {path}; name its folder by --storage-dir, or start one")
    with sentences(), opened(storage_dir, database_url) as (settings, engine, store):
        if not is_current(engine):
            fail("the database has another schema than this build; run `posttrain db upgrade`, or start the server")
        found = Doctor(settings, store, devices(settings.cpu_slots)).examine()
        if job_uuid is not None:
            job = store.jobs.get(job_uuid)
            found = [one for one in found if one.about == f"job {job_uuid}"]
            if job is None:
                fail(f"there is no job {job_uuid}")
            elif not found:
                found = [Finding("note", f"job {job_uuid}", f"it is {job.state}" + (f" ({job.reason})" if job.reason else ""))]
    if as_json:
        show_json([{"level": one.level, "about": one.about, "message": one.message} for one in found])
    else:
        print("\n".join(f"{one.level}: {one.about}: {one.message}" for one in found) or "nothing is wrong")
    if any(one.level == "error" for one in found):
        raise typer.Exit(1)
