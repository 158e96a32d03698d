"""kill -9 at any point, also while saving: what was begun ends with the same weights."""

from pathlib import Path

from ..drivers import kill_report


def test_killed_runs_end_like_the_one_that_was_not(tmp_path: Path) -> None:
    report = kill_report(Path(__file__).with_name("kill_driver.py"), tmp_path)
    assert report["status"] == 0
    assert report["operations"] > 20  # or the driver no longer finds where saving happens
