"""`posttrain config ...`: write a train profile, or say what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain_service.cli.common import fail, sentences
from posttrain_service.cli.profile import PRESETS, presets, read_profile, resolve, template

app = typer.Typer(help="Write and check train profiles.", no_args_is_help=True)
_REQUIRED = ("model_path", "data_path", "ckpt_output_dir")


@app.callback()
def config() -> None:
    """Write and check train profiles."""


@app.command()
def init(
    train_profile: Annotated[Path, typer.Option("--train-profile", help="The profile; checked when it is there, else written.", dir_okay=False)],
    preset: Annotated[str | None, typer.Option("--preset", help=f"Begin with a shipped profile: {', '.join(presets())}.")] = None,
) -> None:
    """Write a profile with every argument, its default and what it means; a profile that is there is checked instead."""
    with sentences():
        if train_profile.exists():
            if preset is not None:
                fail(f"{train_profile} is there already; give another file, or leave --preset out to check it")
            _check(train_profile)
            return
        if preset is not None and preset not in presets():
            fail(f"there is no preset {preset!r}; choose one of {', '.join(presets())}")
        given = {"train_args": {}, "torch_args": {}} if preset is None else read_profile(PRESETS / f"{preset}.yaml")
        with train_profile.open("x", encoding="utf-8") as file:
            file.write(template(given))
        print(f"{train_profile} is written; fill in {', '.join(_REQUIRED)}, then: posttrain train --train-profile {train_profile}")


def _check(path: Path) -> None:
    given = read_profile(path)
    # What a profile leaves out may be given as a flag; an empty value is what `init` writes.
    open_ = [name for name in _REQUIRED if given["train_args"].get(name) in (None, "")]
    given["train_args"] |= dict.fromkeys(open_, "-")
    resolve(given, {})
    print(f"{path} is valid" + (f"; still to be given: {', '.join(open_)}" if open_ else ""))
