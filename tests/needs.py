"""What a machine may lack: the only reasons for which a test is skipped.

Whatever `make test` installs is imported and not asked for, so that its absence fails.
"""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FULL_DISK = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is full"
)


def chromium() -> tuple[str, str]:
    """Chromium and its driver, which pip cannot install; `.ci/run` does, and then they must be."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        lack = "no browser: install chromium and chromedriver (Debian: chromium, chromium-driver)"
        assert "GRADVAC_NEEDS_BROWSER" not in os.environ, lack
        pytest.skip(lack)
    return browser, driver


def cpp_compiler() -> None:
    """What building `native.cpp` takes beside what pip installs; CI has it."""
    found = {
        "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
        "Python's headers": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
    }
    lack = [what for what, is_there in found.items() if not is_there]
    if lack:
        assert "CI" not in os.environ, lack
        pytest.skip(f"no {', no '.join(lack)}: kernels in C++ are optional")


def real_data(part: str) -> Path:
    """The folder of real data with a certain part; where it is absent, the test is skipped."""
    beside = Path(__file__).parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("GRADVAC_DATA", beside))
    if not (folder / part).is_dir():
        pytest.skip("no real data: set GRADVAC_DATA to its folder")
    return folder
