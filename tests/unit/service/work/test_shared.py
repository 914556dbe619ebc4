"""Looks are shared by those who come together, and by nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from posttrain_service.work.shared import Shared


def test_those_who_ask_together_share_one_look() -> None:
    looks: list[str] = []
    go_on = threading.Event()

    def look(key: str) -> int:
        go_on.wait(10)
        looks.append(key)
        return len(looks)

    async def ask() -> None:
        shared = Shared(look, 60.0)
        asked = [asyncio.ensure_future(shared.get("a")) for _ in range(50)]
        other = asyncio.ensure_future(shared.get("b"))
        await asyncio.sleep(0)
        asked[0].cancel()
        go_on.set()
        answers = await asyncio.gather(*asked[1:])
        assert set(answers) == {answers[0]}
        await other
        assert sorted(looks) == ["a", "b"], "one who left took nothing from the others"

    asyncio.run(ask())


def test_an_old_answer_is_not_given_again_nor_kept() -> None:
    looks: list[str] = []

    async def ask() -> None:
        shared = Shared(looks.append, 0.0)
        for key in ("a", "b", "a"):
            await shared.get(key)
            await asyncio.sleep(0.001)
        assert looks == ["a", "b", "a"]
        assert list(shared._looks) == ["a"]

    asyncio.run(ask())


def test_a_failed_look_is_told_to_those_who_shared_it() -> None:
    looks: list[str] = []

    def look(key: str) -> int:
        looks.append(key)
        raise OSError(key)

    async def ask() -> None:
        shared = Shared(look, 60.0)
        answers = await asyncio.gather(*(shared.get("a") for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [OSError] * 3
        assert looks == ["a"]
        with pytest.raises(OSError, match="a"):
            await shared.get("a")
        assert looks == ["a", "a"], "whoever comes later looks anew"

    asyncio.run(ask())


def test_another_event_loop_looks_for_itself() -> None:
    shared = Shared(str.upper, 60.0)
    assert asyncio.run(shared.get("a")) == asyncio.run(shared.get("a")) == "A"


@pytest.mark.parametrize("key", ["a", "b"])
def test_each_key_has_its_own_answer(key: str) -> None:
    assert asyncio.run(Shared(str.upper, 60.0).get(key)) == key.upper()
