"""Modules of Triton kernels, which not every machine can import."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def triton_module(name: str) -> Any:
    """A module of ours by its whole name, or None where Triton is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None
