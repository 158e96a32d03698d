"""Run as a module: forks the processes of the checks, or those of which one is killed."""

import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 (once, before the processes part)
import torchjd.aggregation  # noqa: F401

from .checks import CHECKS
from .deaths import KINDS, train_until_one_dies
from .processes import SIZE, run_checks, start


def main(what: str, folder: str, *chosen: str) -> None:
    """Start what was asked for and wait for it."""
    if what == "checks":
        checks = {name: CHECKS[name] for name in chosen or CHECKS}
        started = start(run_checks, (Path(folder), checks), SIZE)
    else:
        started = []
        for kind in KINDS:
            own = Path(folder) / kind
            own.mkdir()
            started += start(train_until_one_dies, (own, kind), 3)
    for process in started:
        process.join(timeout=240)
        if process.is_alive():
            process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
