"""Tests are skipped for what a machine may lack, never for what we forgot to install."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SKIP = re.compile(r"pytest\.skip|mark\.skip|importorskip|xfail")


def test_reasons_to_skip_are_in_one_place() -> None:
    exempt = {TESTS / "needs.py", Path(__file__)}
    skipping = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if path not in exempt and SKIP.search(path.read_text(encoding="utf-8"))
    ]
    assert not skipping, (
        f"import what `make test` installs, or name the lack in needs.py: {skipping}"
    )
    assert len(SKIP.findall((TESTS / "needs.py").read_text(encoding="utf-8"))) == 5
