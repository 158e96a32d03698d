"""What gradvac says and computes on tiny settings is what it was: see `golden.py`."""

import json
from pathlib import Path

import pytest

from ..drivers import run_driver
from . import golden

PROGRAM = Path(golden.__file__)
MOST_SHOWN = 40


@pytest.mark.parametrize("part", golden.PARTS)
def test_as_before(part: str) -> None:
    said = run_driver(PROGRAM, part, "--print", strict=False, environment=golden.ENVIRONMENT)
    found = json.loads(said.stdout)
    expected = json.loads(golden.expected_file(part).read_text("utf-8"))
    lines = golden.differences(part, expected, found)
    if lines:
        shown = "\n".join(lines[:MOST_SHOWN])
        more = f"; the first {MOST_SHOWN}" if len(lines) > MOST_SHOWN else ""
        hint = f"if all are intended: python tests/golden/golden.py --write {part}"
        pytest.fail(f"{part}: {len(lines)} differences{more}:\n{shown}\n{hint}", pytrace=False)


def test_differences_are_found() -> None:
    before = {"loss": [1.0, 2.0], "said": ["cosine 0.98 of 4 tasks"], "old": None}
    close = {"loss": [1.00001, 2.0], "said": ["cosine 0.97 of 4 tasks"], "old": None}
    assert golden.differences("translation", before, before) == []
    assert golden.differences("translation", before, close) == []
    assert len(golden.differences("library", before, close)) == 2
    far = {"loss": [1.1, 2.5], "said": ["cosine 0.98 of 5 tasks"], "new": 1}
    keys = [line.partition(":")[0] for line in golden.differences("translation", before, far)]
    assert keys == ["loss[0]", "loss[1]", "said[0]", "old", "new"]


def test_every_part_is_expected() -> None:
    files = {path.stem for path in golden.EXPECTED.glob("*.json")}
    assert files == set(golden.PARTS)
