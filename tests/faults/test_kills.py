"""Killed anywhere, and done again: everything is as if nothing had happened, bit for bit."""

from pathlib import Path

from ..drivers import kill_report


def test_what_was_killed_ends_like_what_was_not(tmp_path: Path) -> None:
    report = kill_report(Path(__file__).with_name("kill_driver.py"), tmp_path)
    assert report["kills"] >= 50
    # Or the driver no longer finds where files are written.
    assert all(number > 5 for number in report["operations"].values()), report["operations"]
