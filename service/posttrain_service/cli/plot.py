"""A curve in a terminal, drawn with braille characters (two by four dots each), or with stars where those can't be shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


def plot(points: Sequence[Point], *, width: int = 72, height: int = 14, braille: bool = True) -> list[str]:
    """The curve through the points as lines of text, with the bounds of both axes; empty when no value is finite.

    Args:
        points: (x, y); those whose y is not finite are left out.
        width: Columns of the whole, at least 30.
        height: Lines of the curve, at least 2.
        braille: Draw with braille characters; False = with `*`.
    """
    good = [(float(x), float(y)) for x, y in points if math.isfinite(y)]
    if not good:
        return []
    low, high = min(y for _, y in good), max(y for _, y in good)
    first, last = min(x for x, _ in good), max(x for x, _ in good)
    names = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, names))
    columns = max(10, width - margin - 2)
    across, down = (2, 4) if braille else (1, 1)
    grid = _drawn(good, (first, last), (low, high), columns * across, height * down)
    lines = []
    for row in range(height):
        name = names[0] if row == 0 else names[1] if row == height - 1 else ""
        cells = (_cell(grid, column * across, row * down, braille) for column in range(columns))
        lines.append(f"{name:>{margin}} |{''.join(cells)}".rstrip())
    right = f"{last:g}"
    lines.append(f"{'':>{margin}}  {first:g}{right:>{max(1, columns - len(f'{first:g}'))}}")
    return lines


def _drawn(points: Sequence[Point], xs: Point, ys: Point, columns: int, rows: int) -> set[tuple[int, int]]:
    """(column, row) of every dot of the line through the points; row 0 is at the top."""
    places = [(_scaled(x, xs, columns), rows - 1 - _scaled(y, ys, rows)) for x, y in sorted(points)]
    dots = set(places[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots |= {(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)}
    return dots


def _scaled(value: float, bounds: Point, places: int) -> int:
    low, high = bounds
    share = 0.5 if high == low else (value - low) / (high - low)
    return round(share * (places - 1))


def _cell(dots: set[tuple[int, int]], column: int, row: int, braille: bool) -> str:
    if not braille:
        return "*" if (column, row) in dots else " "
    bits = sum(bit for y, pair in enumerate(_DOTS) for x, bit in enumerate(pair) if (column + x, row + y) in dots)
    return chr(_BRAILLE + bits) if bits else " "
