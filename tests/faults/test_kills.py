"""kill -9 anywhere, and done again: everything is as if nothing had happened, bit for bit."""

import json
from pathlib import Path
from typing import Any

from ..drivers import run_driver


def kill(kind: str, folder: Path) -> dict[str, Any]:
    """What the driver reports about work that it kills in a folder; nothing may have failed."""
    done = run_driver("tests.faults.kill_driver", folder, kind)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["failed"] == [], done.stderr
    return report


def test_a_training_killed_while_saving(tmp_path: Path) -> None:
    report = kill("training", tmp_path)
    assert report["operations"]["train"] > 20  # or the driver no longer finds where saving happens


def test_whatever_is_killed_of_a_translation(tmp_path: Path) -> None:
    report = kill("translation", tmp_path)
    assert report["kills"] >= 30
    # Or the driver no longer finds where files are written.
    assert all(number > 5 for number in report["operations"].values()), report["operations"]
