"""Runs a program in two processes, as `torchrun --nproc-per-node 2` does, without new imports.

python -m tests.architecture.as_torchrun PROGRAM ARGUMENTS
"""

import runpy
import sys
import tempfile
from pathlib import Path

from ..ranks import failures, run_ranks


def work(_: int) -> None:
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        failed = failures(run_ranks(work, 2, Path(folder), as_torchrun=True))
    assert not failed, failed
