"""`make chaos ROUNDS=100`: random faults on real services, shims and processes; exits non-zero when something was lost,
doubled or untrue.

    python tests/chaos [--rounds N] [--seed S] [--minutes M]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos_lab import Lab
from chaos_rounds import FAULTS, PHASES, TARGETS, Round


def main() -> int:
    """Make the rounds and print the table; 1 when there was a violation."""
    parser = argparse.ArgumentParser(prog="make chaos", description="random faults on real services")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="to repeat an earlier run's faults")
    parser.add_argument("--minutes", type=float, default=None, help="begin no further round after that time")
    told = parser.parse_args()
    seed = told.seed if told.seed is not None else random.SystemRandom().randrange(10**6)
    dice, rounds, begun = random.Random(seed), [], time.monotonic()
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="posttrain-chaos-") as folder:
        lab = Lab(Path(folder))
        try:
            lab.server.start()
            for number in range(told.rounds):
                if told.minutes is not None and time.monotonic() - begun > told.minutes * 60:
                    break
                one = Round.drawn(dice).run(lab)
                rounds.append(one)
                print(f"{number + 1:4} {one.seconds:5.1f} s  {one} -> {one.end or 'no end'}", flush=True)
                for fault in one.violations:
                    print(f"     VIOLATION {fault}", flush=True)
                if one.violations:
                    print(lab.story(lab.accepted[-2]), flush=True)
                    lab.close()  # what is left of a bad round must not spoil the next one
                    lab.accepted.clear()
                    (Path(folder) / str(number)).mkdir()
                    lab = Lab(Path(folder) / str(number))
                    lab.server.start()
        finally:
            lab.close()
    table(rounds)
    return 1 if any(one.violations for one in rounds) else 0


def table(rounds: list[Round]) -> None:
    """Rounds and violations by target and fault, then by phase."""
    print(f"\n{'':10}" + "".join(f"{fault:>10}" for fault in FAULTS) + f"{'rounds':>10}{'violations':>12}")
    for target in TARGETS:
        row = [one for one in rounds if one.target == target]
        by_fault = Counter(one.fault for one in row)
        print(f"{target:10}" + "".join(f"{by_fault[fault]:10}" for fault in FAULTS) + f"{len(row):10}{_bad(row):12}")
    for phase in PHASES:
        row = [one for one in rounds if one.phase == phase]
        print(f"{phase:10}" + " " * 30 + f"{len(row):10}{_bad(row):12}")
    print(f"{'all':10}" + " " * 30 + f"{len(rounds):10}{_bad(rounds):12}")


def _bad(rounds: list[Round]) -> int:
    return sum(len(one.violations) for one in rounds)


if __name__ == "__main__":
    sys.exit(main())
