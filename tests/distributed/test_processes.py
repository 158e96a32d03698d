"""Several processes do what one does with all rows."""

from pathlib import Path

import pytest

from .checks import CHECKS
from .deaths import DEAD, KINDS
from .processes import SIZE, read_results, run_driver


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[int, str]], str]:
    folder = tmp_path_factory.mktemp("processes")
    said = run_driver("checks", folder, seconds=300)
    return read_results(folder), said


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, results: tuple[dict[str, dict[int, str]], str]) -> None:
    found, said = results[0].get(name, {}), results[1]
    assert len(found) == SIZE, f"a process did not get there:\n{said}"
    assert not any(found.values()), "\n".join(f"rank {r}: {own}" for r, own in found.items() if own)


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    said = run_driver("deaths", tmp_path, seconds=120)
    for kind in KINDS:
        for rank in {0, 1, 2} - {DEAD}:
            path = tmp_path / kind / f"error{rank}"
            assert path.exists(), said
            assert f"rank {DEAD} has ended or does not answer" in path.read_text()
