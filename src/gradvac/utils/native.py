"""Optional kernels in C++ (`native.cpp`) for steps whose time is calls, not arithmetic, on a CPU.

They are built once per version of torch, where `GRADVAC_NATIVE=1` asks for them, when the first
`Aligner` is made; half a minute with g++ and ninja. Without them, and for whatever they do not
know, everything is computed in torch operations, which are their reference.
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

_NAME, _SOURCE = "gradvac_native", Path(__file__).with_suffix(".cpp")
# No fused multiplications: the sweep is the same to the last bit.
_FLAGS = ["-O3", "-ffp-contract=off", "-Wno-psabi"]


@cache
def native() -> Any:
    """The module, or None where it was not asked for or cannot be built."""
    if os.environ.get("GRADVAC_NATIVE") != "1":
        return None
    try:
        return _load()
    except Exception as error:  # whatever a compiler, a linker or a file system may do
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        logging.getLogger(__name__).warning(
            "GRADVAC_NATIVE: %s was not built, everything is computed in torch operations: %s",
            _SOURCE.name,
            reason,
        )
        return None


def _load() -> Any:
    from torch.utils import cpp_extension

    version = f"{sys.version}{torch.__version__}{_FLAGS}".encode() + _SOURCE.read_bytes()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    built = Path(root) / "gradvac" / hashlib.sha256(version).hexdigest()[:16] / f"{_NAME}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{path}{os.pathsep}{Path(sys.executable).parent}"  # ninja from pip
        try:
            with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # of its own: no locks
                cpp_extension.load(
                    _NAME, [str(_SOURCE)], extra_cflags=_FLAGS, build_directory=folder
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
