"""A public name means one thing in the whole project; functions are short."""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TREES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
MOST_LINES_OF_A_FUNCTION = 60


def test_no_public_name_means_two_things() -> None:
    counts = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    )
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert twice == []


def body_length(function: ast.FunctionDef) -> int:
    """Lines of a function, its docstring and signature apart."""
    body = function.body
    first = body[1] if ast.get_docstring(function) is not None and len(body) > 1 else body[0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_functions_are_short() -> None:
    long = {
        f"{path.name}:{node.name}": body_length(node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and body_length(node) > MOST_LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_nothing_is_left_unfinished() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = [
        (path.name, mark) for path in TREES for mark in marks if mark in path.read_text("utf-8")
    ]
    assert found == []
