"""What a machine may lack: the only reasons for which a test is skipped.

Whatever `make test` installs is imported and not asked for, so that its absence fails.
"""

import os
from pathlib import Path

import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FULL_DISK = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is full"
)


def real_data(part: str) -> Path:
    """The folder of real data with a certain part; where it is absent, the test is skipped."""
    beside = Path(__file__).parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("GRADVAC_DATA", beside))
    if not (folder / part).is_dir():
        pytest.skip("no real data: set GRADVAC_DATA to its folder")
    return folder
