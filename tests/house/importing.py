"""What a file imports, at any depth of its code."""

import ast
from collections.abc import Iterator
from pathlib import Path


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything a file imports; the name is empty for `import module`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor they come from"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
