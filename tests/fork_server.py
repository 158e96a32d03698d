"""Runs programs, each in a fork of one process that has imported once what they share.

`drivers.run_driver` starts it and writes a line of JSON for every program; the answer is a line
with its exit status. Imports take longer than most programs. No program runs in this process
itself: autograd, once used, would not survive a fork.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SHARED = ("pydantic", "typer", "rich.progress", "torch._dynamo", "torch.distributed.fsdp")
SHARED += ("torchjd.aggregation", "transformers", "tokenizers", "accelerate", "safetensors.torch")
SHARED += ("scipy.stats", "scipy.cluster.hierarchy", "sacrebleu", "sentencepiece", "py3langid")
SHARED += ("jinja2", "plotly", "matplotlib.pyplot", "gradvac")


def import_shared() -> None:
    """What programs have in common, our own modules included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SHARED:
            importlib.import_module(name)
        for module in pkgutil.walk_packages(sys.modules["gradvac"].__path__, "gradvac."):
            if not module.name.endswith(".__main__"):
                with contextlib.suppress(ImportError):  # Triton, without a GPU
                    importlib.import_module(module.name)


def become(job: dict[str, Any]) -> None:
    """Be a Python that runs the program, until it ends as that would."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [nothing, *(os.open(job[name], os.O_WRONLY) for name in ("stdout", "stderr"))]
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ |= job["environment"]
    os.chdir(job["folder"])
    warnings.resetwarnings()
    warnings.simplefilter("error" if job["strict"] else "default")
    program = job["program"]
    sys.argv = [program, *job["arguments"]]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = str(Path(__file__).parents[1])
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def wait(child: int, seconds: float) -> int:
    """Its exit status; what takes too long is killed with all that it started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    gc.disable()
    import_shared()
    gc.freeze()  # so that forks share the memory of what was imported
    gc.enable()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            become(job)
            break
        print(wait(child, job["seconds"]), flush=True)


if __name__ == "__main__":
    main()
