"""Curves in a terminal."""

import math

import pytest

from posttrain_service.cli.plot import plot


def test_a_falling_line_in_stars():
    assert plot([(0, 3.0), (3, 0.0)], width=30, height=4, braille=False) == [
        "3 |*****",
        "  |     ********",
        "  |             *********",
        "0 |                      *****",
        "   0                         3",
    ]


def test_braille_has_eight_dots_to_a_character():
    lines = plot([(0, 0.0), (1, 1.0)], width=30, height=3)
    drawn = "".join(lines[:-1]).replace(" ", "")
    assert all(0x2800 < ord(character) < 0x2900 for character in drawn if character not in "01|")
    assert lines[0].startswith("1 |")
    assert lines[2].startswith("0 |")
    assert max(map(len, lines)) <= 30


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(1, math.inf), (2, -math.inf)]])
def test_nothing_to_draw(points):
    assert plot(points) == []


def test_one_value_and_values_that_are_left_out():
    assert len(plot([(5, 2.0)], height=5, braille=False)) == 6
    flat = plot([(1, 2.0), (2, math.nan), (9, 2.0)], width=40, height=3, braille=False)
    assert flat[1].count("*") == 37
    assert plot([(2, 1.0), (1, 2.0)], braille=False) == plot([(1, 2.0), (2, 1.0)], braille=False)
