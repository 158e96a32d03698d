"""Modules of the user's own, by name or by file: rules, recipes, writers."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def import_plugin(where: str, argument: str) -> ModuleType:
    """A module by its name, or by its file: from here, or beside the package (`studies/`).

    Args:
        where: "my_package.rules", or "rules.py".
        argument: What it was given for, named by errors.

    Raises:
        ValueError: There is no such module or file.
    """
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise  # something that the module needs
            raise ValueError(f"{argument}: there is no module {where!r}.") from None
    package = Path(__file__).parents[1]
    places = [folder / where for folder in (Path(), package, package.parents[1])]
    file = next((place.resolve() for place in places if place.is_file()), None)
    if file is None:
        raise ValueError(f"{argument}: there is no file {where} in {Path().resolve()}.")
    # A name of its own: `random.py` is not Python's. And once: a class has one identity.
    name = f"gradvac_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def plugin_class(name: str, base: type[T], argument: str) -> type[T]:
    """A class of the user's own: "module:Class" or "file.py:Class".

    Args:
        name: Where it is.
        base: What it must be a subclass of.
        argument: What it was given for, named by errors.

    Raises:
        ValueError: There is no such class.
    """
    where, _, class_name = name.rpartition(":")
    found = getattr(import_plugin(where, argument), class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{argument}: {class_name!r} of {where} is no subclass of gradvac's {base.__name__}."
        )
    return found
