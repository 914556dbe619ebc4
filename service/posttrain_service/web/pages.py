"""Serve the dashboard: one page and its assets, with a policy under which no text of a job can become a program.

Nothing is rendered here and nothing of jobs is read: the page fetches all it shows from the HTTP API, with the caller's
key, so it sees exactly what that caller may see. It is told where the API is (behind a path prefix too) by `<base>`.
"""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).with_name("static")
ASSETS = "/dashboard"
"""Path below which the assets lie; like the page itself they need no key, since they say nothing of jobs."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""No program but the files of this folder, no request but to this server, no frame around the page, no text as markup."""

HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # asked for anew each time, answered by 304: an upgraded server has no stale page
}


class _Assets(StaticFiles):
    """The folder's files, with the headers of the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file, or 304 where the browser has it."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI) -> None:
    """Put the page at `/` and its assets below ASSETS."""
    app.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False, response_class=HTMLResponse)
    app.mount(ASSETS, _Assets(directory=STATIC), name="dashboard")


def page(request: Request) -> Response:
    """The one page; which view it shows stands behind the `#` of its address."""
    prefix: Any = request.scope.get("root_path", "")
    return HTMLResponse(_page().replace("{base}", html.escape(f"{prefix}/")), headers=HEADERS)


@cache
def _page() -> str:
    return (STATIC / "index.html").read_text(encoding="utf-8")
