"""`torch.compile(model, backend="gradvac")` where the package is only found on a path.

Torch finds backends by the entry points of installed packages. Asked for all of them, Python asks
every finder of modules for packages too: ours names this one. Neither torch nor the engine is
imported for that.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_GROUP, _NAME, _FUNCTION = "torch_dynamo_backends", "gradvac", "gradvac.engine:compile_tapped"


class PathDistribution:
    """Finds no module, and one package without files."""

    @staticmethod
    def find_spec(*_: object) -> None:
        """No module."""

    @staticmethod
    def find_distributions(context: Any) -> Iterator[Any]:
        """This package, where all are asked for; one that is installed comes first."""
        if context.name is not None:
            return
        from importlib.metadata import Distribution

        class Found(Distribution):
            def read_text(self, filename: str) -> str | None:
                entry_point = f"[{_GROUP}]\n{_NAME} = {_FUNCTION}\n"
                texts = {"METADATA": f"Name: {_NAME}\n", "entry_points.txt": entry_point}
                return texts.get(filename)

            def locate_file(self, path: Any) -> Any:
                return Path(path)

        yield Found()


def announce() -> None:
    """Let torch find the backend."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is None:
        sys.meta_path.append(PathDistribution)
    elif _NAME not in getattr(registry, "_BACKENDS", {_NAME}):  # it may have looked, once for all
        registry.register_backend(_compile, name=_NAME)


def _compile(*given: Any, **options: Any) -> Callable[..., Any]:
    from importlib.metadata import EntryPoint

    compiled: Callable[..., Any] = EntryPoint(_NAME, _FUNCTION, _GROUP).load()(*given, **options)
    return compiled
