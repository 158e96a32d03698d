"""Killed anywhere, and done again: everything is as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_what_was_killed_ends_like_what_was_not(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("kill_driver.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(driver), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == [], done.stderr
    assert report["kills"] >= 50
    # Or the driver no longer finds where files are written.
    assert all(number > 5 for number in report["operations"].values()), report["operations"]
