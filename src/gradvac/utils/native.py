"""What is written in C++ (`native.cpp`, `engine/cpp/`), for steps whose time is calls.

`GRADVAC_NATIVE=1` builds it when the first `Aligner` is made, once per version of torch: half a
minute with g++ and ninja. From then on it is used wherever that variable is not set to 0. Without
it, and for whatever it does not know, everything is computed by Python and torch, the reference.
"""

import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

_LOGGER = logging.getLogger(__name__)
_NAME, _HERE = "gradvac_native", Path(__file__).parent
_FILES = sorted([*_HERE.glob("native.*[hp]"), *(_HERE.parent / "engine" / "cpp").iterdir()])
_SOURCES = [file for file in _FILES if file.suffix == ".cpp"]
# No fused multiplications: the sweep is the same to the last bit. Without OpenMP, torch's headers
# take `at::parallel_for` for a loop on one thread, and say nothing.
_THREADS = ["-fopenmp"] if sys.platform == "linux" else []
_FLAGS = ["-O3", "-ffp-contract=off", "-Wno-psabi", *_THREADS]


@cache
def native() -> Any:
    """The module, or None where it was not built, or is not wanted."""
    wish = os.environ.get("GRADVAC_NATIVE", "")
    if wish == "0":
        return None
    try:
        return _load(may_build=wish == "1")
    except Exception as error:  # whatever a compiler, a linker or a file system may do
        lines = str(error).strip().splitlines() or [type(error).__name__]
        causes = [line for line in lines if "error:" in line or "not found" in line]
        _LOGGER.warning(
            "GRADVAC_NATIVE: what is written in C++ is not used, everything is computed in torch "
            "operations. Building it takes g++, ninja and Python's headers: %s",
            (causes or lines)[0],
        )
        return None


def _load(*, may_build: bool) -> Any:
    version = f"{sys.version}{torch.__version__}{_FLAGS}".encode()
    for file in _FILES:
        version += file.read_bytes()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    built = Path(root) / "gradvac" / hashlib.sha256(version).hexdigest()[:16] / f"{_NAME}.so"
    if not built.exists():
        if not may_build:
            return None
        from torch.utils import cpp_extension

        built.parent.mkdir(parents=True, exist_ok=True)
        _LOGGER.warning("GRADVAC_NATIVE: building %s, once: about half a minute.", built)
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{path}{os.pathsep}{Path(sys.executable).parent}"  # ninja from pip
        try:
            with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # of its own: no locks
                cpp_extension.load(
                    _NAME,
                    [*map(str, _SOURCES)],
                    extra_cflags=_FLAGS,
                    extra_ldflags=_THREADS,
                    build_directory=folder,
                )
                (Path(folder) / built.name).replace(built)
        finally:
            os.environ["PATH"] = path
    spec = importlib.util.spec_from_file_location(_NAME, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
