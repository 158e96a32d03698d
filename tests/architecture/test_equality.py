"""`==` of objects that hold tensors or arrays compares by identity: it never raises.

The `==` of two arrays is an array, which has no truth value, so that comparing fields would raise.
Every class that is made of named fields is made twice here, with arrays where its fields may hold
some, and compared.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).parents[2] / "src"
ARRAYS = ("Tensor", "NDArray", "ndarray", "Floats", "Matrix", "Tokens", "Numbers", "Bools")
ENGINE = SOURCE / "gradvac" / "engine"  # its records live for one backward and are never compared


def classes() -> Iterator[type]:
    """All classes of named fields."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ENGINE in path.parents or not ("@dataclass" in text or "NamedTuple)" in text):
            continue
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for one in vars(importlib.import_module(name)).values():
            here = isinstance(one, type) and one.__module__ == name and not inspect.isabstract(one)
            if here and (dataclasses.is_dataclass(one) or hasattr(one, "_fields")):
                yield one


CLASSES = list(classes())


def may_hold_arrays(annotation: Any) -> bool:
    """Whether a field may hold a tensor or an array, itself or inside a list or a table."""
    if isinstance(annotation, str):
        return "Callable" not in annotation and any(name in annotation for name in ARRAYS)
    if annotation in (Tensor, np.ndarray) or "ndarray" in str(annotation):
        return True
    if "Callable" in str(annotation):
        return False
    return any(may_hold_arrays(part) for part in get_args(annotation))


def make(one: type, fill: Any) -> Any:
    """An object with arrays in the fields that may hold them and nothing in the others."""
    annotations = {
        name: annotation
        for base in reversed(one.__mro__)
        for name, annotation in vars(base).get("__annotations__", {}).items()
    }
    if issubclass(one, tuple):
        names = one._fields  # type: ignore[attr-defined]
        values = [fill() if may_hold_arrays(annotations.get(name)) else None for name in names]
        return tuple.__new__(one, values)
    made = object.__new__(one)
    for field in dataclasses.fields(one):
        value = fill() if may_hold_arrays(annotations[field.name]) else None
        object.__setattr__(made, field.name, value)
    return made


@pytest.mark.parametrize("fill", [lambda: np.zeros(3), lambda: torch.zeros(3)])
def test_equality_never_raises(fill: Any) -> None:
    assert len(CLASSES) > 60
    wrong = []
    for one in CLASSES:
        first, second = make(one, fill), make(one, fill)
        try:
            bool(first == second)
            assert first == first
        except (ValueError, RuntimeError):
            wrong.append(f"{one.__module__}.{one.__name__}")
    assert not wrong, "give them @dataclass(frozen=True, eq=False)"


def test_the_rule_can_fail() -> None:
    @dataclasses.dataclass
    class Compared:
        values: "dict[str, Tensor]"

    class Tuple(NamedTuple):
        values: np.ndarray

    for one in (Compared, Tuple):
        with pytest.raises((ValueError, RuntimeError), match=r"truth value|Boolean value"):
            bool(make(one, lambda: np.zeros(3)) == make(one, lambda: np.zeros(3)))
