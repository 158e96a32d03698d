"""Run as a module: starts the processes of the checks, or those of which one is killed."""

import json
import sys
from functools import partial
from pathlib import Path

from ..ranks import StartedRanks, failures, run_ranks
from .checks import CHECKS
from .deaths import KINDS, train_until_one_dies
from .processes import SIZE, run_checks


def main(what: str, where: str, *chosen: str) -> None:
    """Start what was asked for and wait for it."""
    folder = Path(where)
    if what == "checks":
        checks = {name: CHECKS[name] for name in chosen or CHECKS}
        work = partial(run_checks, folder=folder, checks=checks)
        print(*failures(run_ranks(work, SIZE, folder, seconds=540)), sep="\n")
    else:
        started = {
            kind: StartedRanks(partial(train_until_one_dies, kind=kind), 3, folder / kind)
            for kind in KINDS
        }
        found = {kind: failures(ranks.wait()) for kind, ranks in started.items()}
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
