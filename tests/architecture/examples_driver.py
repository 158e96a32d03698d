"""Runs programs, each in a fork of this process; prints what came of them as JSON.

    python -W error examples_driver.py FOLDER FILE...

The libraries they share are imported once, here, which takes longer than most examples.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path

SHARED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "gradvac",
    "transformers",
    "accelerate",
)


def run(path: str, output: Path) -> int:
    """The exit status of a program whose output goes to a file."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Python warns of threads: those of NumPy's matrix products, which are idle.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    status = 1
    try:
        runpy.run_path(path, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(folder: Path, paths: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SHARED:
            importlib.import_module(name)
    found = {}
    for path in paths:
        output = folder / Path(path).name
        found[Path(path).name] = run(path, output), output.read_text(encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
