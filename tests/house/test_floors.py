"""A floor imports only from floors below; rooms on one floor do not import each other."""

from pathlib import Path

import pytest

from .importing import imports

SOURCE = Path(__file__).parents[2] / "src" / "gradvac"
FLOORS = {
    "gram": 0,
    "hints": 0,
    "sides": 0,
    "indices": 0,
    "triton_modules": 0,
    "recording": 0,
    "models": 0,
    "options": 0,
    "restored": 1,
    "tasks": 0,
    "rules": 1,
    "gradients": 1,
    "alignment": 1,
    "aligner": 2,
    "runs": 2,
    "corpora": 3,
    "analysis": 3,
    "training": 4,
    "nmt": 5,
    "tagging": 5,
    "integrations": 5,
    "experiments": 6,
    "cli": 7,
}
ALONE = {"corpora"}  # imports nothing of ours


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of gradvac that a file imports."""
    names = (f"{module}.{name}".rstrip(".").split(".") for module, name in imports(path))
    return {parts[1] for parts in names if parts[0] == "gradvac" and len(parts) > 1}


def public_names() -> set[str]:
    import gradvac

    return set(gradvac.__all__)


FILES = [
    path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in FLOORS
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_come_from_below(path: Path) -> None:
    room = room_of(path)
    assert room in FLOORS, f"{room} has no floor yet: add it to FLOORS and to the README's map"
    for other in imported_rooms(path) - {room}:
        if other in public_names():  # `from gradvac import Aligner`: the top of floor 2
            assert FLOORS[room] > FLOORS["aligner"], f"{path} imports the public API from below it"
            continue
        assert room not in ALONE, f"{room} imports nothing of ours, but {path.name} uses {other}"
        assert other in FLOORS, f"{path.name} imports gradvac.{other}, which has no floor"
        assert FLOORS[other] < FLOORS[room], f"{path.name}: {room} may not import {other}"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from gradvac.gradients import rows\nimport gradvac.cli.main\n")
    assert imported_rooms(wrong) == {"gradients", "cli"}
