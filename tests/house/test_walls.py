"""Walls inside `gradients/`: a room imports from the rooms it may, and only what they offer."""

import importlib
import re
from pathlib import Path

import pytest

import gradvac.gradients

from .importing import imports

SOURCE = Path(gradvac.gradients.__file__).parents[1]
HOUSE = "gradvac.gradients"
_ROOM = re.compile(r"(?m)^    (\w+)  +(none|\w+(?:, \w+)*)$")


def doors(text: str) -> dict[str, list[str]]:
    """Room -> the rooms it may import from, as the map of `gradients/` says."""
    return {
        room: [] if others == "none" else others.split(", ") for room, others in _ROOM.findall(text)
    }


DOORS = doors(gradvac.gradients.__doc__ or "")
FILES = sorted(SOURCE.rglob("*.py"))


def faults(path: Path, room: str | None, allowed: dict[str, list[str]]) -> list[str]:
    """What a file imports through a wall.

    Args:
        path: The file.
        room: The room of `gradients/` it is in; "" is their `__init__`, None the rest of gradvac.
        allowed: Room -> the rooms it may import from.
    """
    wrong = []
    for module, name in imports(path):
        if not f"{module}.{name}".startswith(f"{HOUSE}."):
            continue
        inside = module.removeprefix(HOUSE).removeprefix(".")
        other = inside.split(".")[0]
        if room is not None and room == other != "":
            continue  # at home
        reachable = {None: [""], "": list(allowed)}.get(room, allowed.get(room or "", []))
        if other not in reachable:
            wrong.append(f"{other or 'gradients'} is behind a wall: {module}.{name}")
        elif "." in inside or name not in importlib.import_module(module).__all__:
            wrong.append(f"{name} is not offered by {module}")
    return wrong


def room_of(path: Path) -> str | None:
    parts = path.relative_to(SOURCE).parts
    if parts[0] != "gradients":
        return None
    return parts[1] if len(parts) > 2 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_import_goes_through_a_wall(path: Path) -> None:
    assert faults(path, room_of(path), DOORS) == []


def test_every_room_has_its_doors_and_none_leads_in_a_circle() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("gradients/*/__init__.py")}
    assert set(DOORS) == rooms
    before: set[str] = set()
    for room, others in DOORS.items():
        assert before.issuperset(others), f"{room} may import a room that stands below it"
        before.add(room)


def test_what_a_room_offers_is_wanted() -> None:
    wanted = {pair for path in SOURCE.glob("gradients/**/*.py") for pair in imports(path)}
    for room in DOORS:
        module = f"{HOUSE}.{room}"
        unwanted = [n for n in importlib.import_module(module).__all__ if (module, n) not in wanted]
        assert unwanted == [], f"{module}: nobody imports it"


def collectives(text: str) -> list[str]:
    """Calls between processes: `dist.all_reduce` and its like."""
    kinds = "all_|barrier|batch_|broadcast|gather|irecv|isend|new_group|recv|reduce|scatter|send"
    return re.findall(rf"\bdist(?:ributed)?\.(?:{kinds})\w*|_functional_collectives", text)


def test_all_collectives_are_in_one_file() -> None:
    found = {path for path in FILES if collectives(path.read_text("utf-8"))}
    assert found == {SOURCE / "gradients" / "processes" / "_distributed.py"}


@pytest.mark.parametrize(
    ("room", "line", "fault"),
    [
        ("kernels", "from gradvac.gradients.graph import Graph", "behind a wall"),
        ("graph", "from gradvac.gradients import losses", "behind a wall"),
        ("fold", "import gradvac.gradients.engines", "behind a wall"),
        ("losses", "from gradvac.gradients.graph._graph import Graph", "not offered"),
        ("losses", "from gradvac.gradients.graph import _graph", "not offered"),
        (None, "from gradvac.gradients.graph import Graph", "behind a wall"),
        (None, "from gradvac.gradients import graph", "not offered"),
    ],
)
def test_the_rule_can_fail(tmp_path: Path, room: str | None, line: str, fault: str) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"def f():\n    {line}\n")
    (found,) = faults(wrong, room, DOORS)
    assert fault in found
