"""Every room has a map: its `__init__` names each of its files, in a line that says what it is."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradvac"
ROOMS = sorted(path.parent for path in SOURCE.rglob("__init__.py"))


def unnamed(room: Path) -> list[str]:
    """Files and inner rooms that the map leaves out, and names on it that are no files."""
    tree = ast.parse((room / "__init__.py").read_text("utf-8"))
    docstring = ast.get_docstring(tree, clean=False) or ""
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    files |= {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    missing = [
        name for name in sorted(files) if not re.search(rf"(?m){re.escape(name)}\W+\w+", docstring)
    ]
    named = re.findall(r"(?m)^(?:    |- `)?([\w]+\.py|[\w]+/)`?:? ", docstring)
    return missing + [f"{name} (no such file)" for name in named if not (room / name).exists()]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(SOURCE.parent)))
def test_the_map_is_complete(room: Path) -> None:
    assert unnamed(room) == []


@pytest.mark.parametrize("indent", ["", "    "])
def test_the_rule_can_fail(tmp_path: Path, indent: str) -> None:
    (tmp_path / "__init__.py").write_text(f'"""A room.\n\n{indent}gone.py   what was\n"""\n')
    (tmp_path / "here.py").touch()
    assert unnamed(tmp_path) == ["here.py", "gone.py (no such file)"]
