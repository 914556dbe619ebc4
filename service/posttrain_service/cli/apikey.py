"""Where the command line has its API key from. Never from a flag: every user of the machine sees the flags of a process."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from posttrain_service.errors import InvalidRequest

KEY_VARIABLE = "POSTTRAIN_API_KEY"
KEY_FILE_VARIABLE = "POSTTRAIN_API_KEY_FILE"
_MOST_BYTES = 4096


def default_key_file() -> Path:
    """The file that is read when nothing else is told."""
    return Path(platformdirs.user_config_path("posttrain")) / "api-key"


def read_key(file: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key: that in `file`, else POSTTRAIN_API_KEY, else that in the default file; None when there is none.

    Raises:
        InvalidRequest: The file can be read by other users, or it holds no key.
        OSError: `file` cannot be read.
    """
    if file is not None:
        return _in_file(file)
    if text := environ.get(KEY_VARIABLE, "").strip():
        return _checked(text, KEY_VARIABLE)
    default = default_key_file()
    return _in_file(default) if default.is_file() else None


def _in_file(path: Path) -> str:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise InvalidRequest(f"{path} has the mode {mode:o}, so other users may read the key in it; say: chmod 600 {path}")
        text = file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    return _checked(text, str(path))


def _checked(text: str, where: str) -> str:
    if not text or not all("!" <= character <= "~" for character in text):  # the key itself is not repeated
        raise InvalidRequest(f"{where} holds no API key: a key is one word of visible ASCII characters, such as pt_...")
    return text
