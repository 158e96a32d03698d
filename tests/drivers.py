"""Programs outside the package: run in a Python of their own, or loaded."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def run_driver(
    driver: Path | str,
    *args: object,
    options: tuple[str, ...] = ("-W", "error"),
    environment: Mapping[str, str] | None = None,
    seconds: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program, or a module of the tests by its name, on one thread; it must succeed."""
    program = ("-m", driver) if isinstance(driver, str) else (str(driver),)
    done = subprocess.run(
        [sys.executable, *options, *program, *map(str, args)],
        cwd=Path(__file__).parents[1] if isinstance(driver, str) else None,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def load_module(path: Path) -> ModuleType:
    """Import a file that no package has, such as a benchmark."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
