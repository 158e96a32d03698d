"""What all commands share: where configs are, and how mistakes are told."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import typer

import gradvac
from gradvac.nmt import NmtConfig
from gradvac.runs import RunFolder
from gradvac.training import CheckpointError, DivergedError, config
from gradvac.training.config import Config

Parameters = ParamSpec("Parameters")
_REPORT = ("scipy", "matplotlib", "plotly", "jinja2")


def tells_mistakes(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Tell what a user can mend in one line, on standard error, instead of a traceback."""

    @wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                if not sys.warnoptions:  # who asks Python for warnings gets Python's
                    warnings.showwarning = _tell_warning
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read our output has seen enough: that is for click to handle
        except (ValueError, CheckpointError, DivergedError, OSError) as mistake:
            print(f"error: {mistake}", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def _tell_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def require_report() -> None:
    """Refuse to begin what would fail at its end: report and figures are an extra."""
    missing = [name for name in _REPORT if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f'this command needs {", ".join(missing)}; pip install "gradvac[nmt,report]".'
        )


def config_folders(recipe: str) -> list[Path]:
    """Return the folders with named configs: in the package, or beside it in a checkout."""
    package = Path(gradvac.__file__).parent
    candidates = (package / "configs" / recipe, package.parents[1] / "configs" / recipe)
    return [folder for folder in candidates if folder.is_dir()]


def load_config(
    model_class: type[Config], recipe: str, source: str, overrides: list[str]
) -> Config:
    """Read a config from a file, by name, or from a run folder.

    Args:
        model_class: The recipe's config.
        recipe: The folder of its named configs.
        source: What the user gave.
        overrides: `section.key=value`.
    """
    path = Path(source)
    folder = RunFolder(path)
    if folder.is_run():
        return config.load(model_class, folder.config, overrides)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {folder.config.name}; give a config or a run folder."
        )
    return config.load(model_class, source, overrides, folders=config_folders(recipe))


def load_nmt(source: str, overrides: list[str]) -> NmtConfig:
    """Read the config of a translation run."""
    return load_config(NmtConfig, "nmt", source, overrides)


def run_folder(source: str, run: Path | None) -> Path:
    """The folder to train in: as asked, the run that was given, or one named after the config."""
    if run is not None:
        return run
    return Path(source) if RunFolder(Path(source)).is_run() else Path("runs") / Path(source).stem


def require_run(run: Path) -> Path:
    """Refuse what is not a run folder."""
    folder = RunFolder(run)
    if not folder.is_run():
        raise ValueError(f"{run} is not a run folder: it has no {folder.config.name}.")
    return run
