"""Every integration in two processes does what it does in one with all rows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    driver = Path(__file__).with_name("ranks_driver.py")
    port = random.SystemRandom().randint(20_000, 30_000)
    done = subprocess.run(
        [sys.executable, str(driver), str(folder), str(port)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


@pytest.mark.parametrize("name", ["hugging_face", "resumed", "accelerate", "lightning"])
def test_two_processes_do_what_one_does(found: dict[str, Any], name: str) -> None:
    """With accumulation, in float64; `resumed` is also the uninterrupted run, bit for bit."""
    assert found[name]["gap"] < 1e-12, found
    assert found[name]["moved"] > 1e-3
