"""Several processes do what one does with all rows."""

import json
from pathlib import Path

import pytest

from ..drivers import run_driver
from .checks import CHECKS
from .deaths import DEAD, KINDS
from .processes import SIZE, read_results

DRIVER = "tests.distributed.driver"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[int, str]], str]:
    folder = tmp_path_factory.mktemp("processes")
    done = run_driver(DRIVER, "checks", folder)
    return read_results(folder), done.stdout + done.stderr


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, results: tuple[dict[str, dict[int, str]], str]) -> None:
    found, output = results[0].get(name, {}), results[1]
    assert len(found) == SIZE, f"a process did not get there:\n{output}"
    wrong = [f"rank {rank}: {error}" for rank, error in found.items() if error]
    assert not wrong, "\n".join(wrong)


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    run_driver(DRIVER, "deaths", tmp_path, seconds=120)
    found = json.loads((tmp_path / "found.json").read_text())
    for kind in KINDS:
        for rank, failure in enumerate(found[kind]):
            named = f"rank {DEAD} has ended or does not answer"
            assert ("Gone" if rank == DEAD else named) in failure
