"""Runs a program in two processes, as `torchrun --nproc-per-node 2` does, without new imports.

python -m tests.architecture.as_torchrun PROGRAM
"""

import runpy
import sys
import tempfile
from pathlib import Path

from ..ranks import failures, run_ranks


def work(_: int) -> None:
    runpy.run_path(sys.argv[1], run_name="__main__")
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        failed = failures(run_ranks(work, 2, Path(folder), as_torchrun=True))
    assert not failed, failed
