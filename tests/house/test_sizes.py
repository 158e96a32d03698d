"""Caps that keep the code readable."""

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60


def body_length(function: ast.FunctionDef) -> int:
    """Lines of a function, its docstring and signature apart."""
    body = function.body
    has_docstring = ast.get_docstring(function) is not None
    first = body[1] if has_docstring and len(body) > 1 else body[0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {str(p): n for p, n in lengths.items() if n > MOST_LINES_OF_A_FILE}
    assert not long, f"is there a seam to cut along? {long}"
    assert statistics.median(lengths.values()) <= 160


def test_functions_are_short() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and body_length(node) > MOST_LINES_OF_A_FUNCTION:
                long[f"{path.name}:{node.name}"] = body_length(node)
    assert not long, f"functions over {MOST_LINES_OF_A_FUNCTION} lines: {long}"


def test_nothing_is_left_unfinished() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = [
        f"{path.name}: {mark}"
        for path in FILES
        for mark in marks
        if mark in path.read_text(encoding="utf-8")
    ]
    assert not found
