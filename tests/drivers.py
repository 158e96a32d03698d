"""Programs outside the package: run in a process of their own, or loaded."""

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("fork_server.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}


class Said(NamedTuple):
    """What a program wrote."""

    stdout: str
    stderr: str


def run_driver(
    driver: Path | str,
    *args: object,
    strict: bool = True,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    seconds: float = 600,
) -> Said:
    """Run a program, or a module by its name, on one thread; it must succeed.

    Args:
        driver: The program.
        args: Its arguments.
        strict: Let warnings be errors.
        environment: Variables to set.
        folder: Where it runs.
        seconds: After which it is killed.
    """
    with tempfile.TemporaryDirectory() as place:
        files = {name: Path(place) / name for name in Said._fields}
        for file in files.values():
            file.touch()
        job = {"program": str(driver), "arguments": list(map(str, args)), "strict": strict}
        job |= {name: str(file) for name, file in files.items()}
        job |= {"folder": str(folder), "environment": dict(environment or {}), "seconds": seconds}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(job), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        said = Said(*(file.read_text("utf-8") for file in files.values()))
    assert status == "0", f"{driver} ended with status {status}:\n{said.stdout}\n{said.stderr}"
    return said


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER)],
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def load_module(path: Path) -> ModuleType:
    """Import a file that no package has, such as a benchmark."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
