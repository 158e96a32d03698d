"""`==` of dataclasses that hold tensors or arrays compares by identity: it never raises.

The `==` of two arrays is an array, which has no truth value, so that comparing fields would raise.
"""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradvac"
ARRAYS = re.compile(r"\b(Tensor|NDArray|Floats|Matrix|Tokens|Numbers|Bools)\b")
ENGINE = SOURCE / "gradients"  # its records live for one backward and are never compared
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if ENGINE not in path.parents]


def comparing_values(source: str) -> list[str]:
    """Names of classes with arrays whose `==` would look at them."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        annotations = [line.annotation for line in node.body if isinstance(line, ast.AnnAssign)]
        fields = [text for text in map(ast.unparse, annotations) if "Callable" not in text]
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        compares = "dataclass" in decorators and "eq=False" not in decorators
        if compares and ARRAYS.search(" ".join(fields)):
            wrong.append(node.name)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_objects_with_arrays_compare_by_identity(path: Path) -> None:
    assert comparing_values(path.read_text(encoding="utf-8")) == []


def test_the_rule_can_fail() -> None:
    assert comparing_values("@dataclass\nclass A:\n    x: Tensor") == ["A"]
    assert comparing_values("@dataclass()\nclass A:\n    x: list[Tensor]") == ["A"]
    assert comparing_values("@dataclass\nclass A:\n    x: Callable[[], Tensor]") == []
    assert comparing_values("@dataclass(eq=False)\nclass A:\n    x: Tensor") == []
