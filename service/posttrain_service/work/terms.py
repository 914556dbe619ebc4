"""What a face says of a request besides the request itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """A face's demands on the rows, and what it tells."""

    unwanted: frozenset[str] = frozenset()
    """Shapes of rows that are not what was asked for."""
    warnings: tuple[str, ...] = ()
    """What the one who asked should know."""
