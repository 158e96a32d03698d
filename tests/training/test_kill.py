"""kill -9 at any point, also while saving: what was begun ends with the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_runs_end_like_the_one_that_was_not(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("kill_driver.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(driver), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == 0
    assert report["operations"] > 20  # or the driver no longer finds where saving happens
    assert report["failed"] == []
