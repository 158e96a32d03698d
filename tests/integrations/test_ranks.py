"""Every integration in two processes does what it does in one with all rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..drivers import run_driver


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    run_driver("tests.integrations.ranks_driver", folder, strict=False)
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


NAMES = [
    *("hugging_face", "resumed", "hugging_face_fsdp2"),
    *("accelerate", "accelerate_fsdp2", "lightning", "lightning_fsdp2"),
]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_do_what_one_does(found: dict[str, Any], name: str) -> None:
    """With accumulation, in float64; `resumed` is also the uninterrupted run, bit for bit."""
    assert found[name]["gap"] < 1e-12, found
    assert found[name]["moved"] > 1e-3


def test_mixed_training_in_two_processes_goes_on_exactly(found: dict[str, Any]) -> None:
    """Its batches differ from those of one process, so that only continuing is compared."""
    assert found["mixed"]["moved"] > 1e-3, found
