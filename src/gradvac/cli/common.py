"""What commands share: options, output, where configs are, and how mistakes are reported."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterable
from functools import wraps
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TextIO

import typer

import gradvac
from gradvac.lab.recipes import recipe_named, recipe_of
from gradvac.utils.hints import install_line, log_to


def utf8_output() -> TextIO:
    """Standard output for what programs read: UTF-8 in any locale.

    Raises:
        ValueError: It is closed.
    """
    if sys.stdout is None:
        raise ValueError("standard output is closed; send it to a file, or to a pipe.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    return sys.stdout


def tolerate_terminal() -> None:
    """Let what a terminal cannot show appear as escapes, instead of ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


Source = Annotated[
    str, typer.Argument(help="A TOML file, the name of one in configs/, or a run folder.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Into = Annotated[Path | None, typer.Option(help="The run folder; default: runs/NAME-OF-CONFIG.")]
Weights = Annotated[str, typer.Option(help="best, last, averaged, or a step.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Runs = Annotated[
    list[Path], typer.Argument(help="Run folders; the others are compared with the first.")
]
Distances = Annotated[
    str,
    typer.Option(
        help="Known distances of tasks: genealogy, uriel:KIND (such as uriel:featural), or a CSV "
        "file."
    ),
]
Families = Annotated[
    Path | None, typer.Option(help='Families of tasks: a TOML file with lines fr = "Romance".')
]


def serve(server: ThreadingHTTPServer, does: str, *, show: bool) -> None:
    """Serve a page until the user stops it with Ctrl-C."""
    with server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://localhost:{server.server_port}/"
        print(f"The page is at {address} and {does}; stop with Ctrl-C.", flush=True)
        if show:
            webbrowser.open(address)
        server.serve_forever()


def given_run(
    run: Path, recipe: str, weights: str, device: str, overrides: list[str] | None
) -> dict[str, Any]:
    """A run of a recipe and how to load it, as functions that read a trained run take it."""
    return {
        "run": require_run(run, recipe),
        "weights": weights_of(weights),
        "device": device,
        "overrides": overrides or [],
    }


def weights_of(name: str) -> str | int:
    """The weights that a `Weights` option names: a step becomes a number."""
    return int(name) if name.isdigit() else name


Parameters = ParamSpec("Parameters")
Command = Callable[Parameters, None]


_OF_REPORT = ("scipy", "matplotlib", "plotly", "jinja2")  # what it imports at the end
_FULL = "make room, and start the same command again"
_CLOSED = "change its permissions, or choose another place"
_NO_FOLDER = "choose another name: there is a file where a folder should be"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _CLOSED),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _NO_FOLDER),
    errno.EISDIR: "name a file in it",
    errno.EADDRINUSE: "choose another port with --port, or 0 for any free one",
}


def needs(*extras: str) -> Callable[[Command[Parameters]], Command[Parameters]]:
    """Decorate a command that needs extras: a missing package is one line with what to install.

    A command imports what it needs before it does anything; only the packages of the extra
    "report" are imported at the end, so they are looked for first. Mistakes are reported as by
    `reports_mistakes`.
    """

    def with_extras(command: Command[Parameters]) -> Command[Parameters]:
        @wraps(command)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            if "report" in extras:
                _check_installed([one for one in _OF_REPORT if find_spec(one) is None], extras)
            try:
                command(*args, **kwargs)
            except ModuleNotFoundError as error:
                package = (error.name or "gradvac").partition(".")[0]
                if package == "gradvac":
                    raise
                _check_installed([package], extras)

        return reports_mistakes(run)

    return with_extras


def _check_installed(packages: list[str], extras: Iterable[str]) -> None:
    if packages:
        raise ValueError(
            f"this command needs {', '.join(packages)}, not installed here; "
            f"{install_line(*extras)}."
        )


def reports_mistakes(command: Command[Parameters]) -> Command[Parameters]:
    """Report what a user can fix in one line on standard error, instead of a traceback.

    What the package logs is shown on standard output, as plain lines.
    """

    @wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            with log_to(print), warnings.catch_warnings():
                if not sys.warnoptions:  # with -W, Python's own format is wanted
                    warnings.showwarning = _print_warning
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of our output closed the pipe: click handles that
        except Exception as mistake:
            is_ours = type(mistake).__module__.startswith("gradvac.")  # as CheckpointError
            if not is_ours and not isinstance(mistake, ValueError | OSError):
                raise
            print(f"error: {_explain(mistake)}", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def _explain(mistake: Exception) -> str:
    """The message; errors of the operating system also need a remedy."""
    text, remedy = str(mistake), None
    if isinstance(mistake, OSError) and mistake.errno is not None:
        remedy = _REMEDIES.get(mistake.errno)
    return text if remedy is None or ";" in text else f"{text}; {remedy}."


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def config_folders(recipe: str) -> list[Path]:
    """The folders with named configs: in the package, or next to it in a checkout."""
    package = Path(gradvac.__file__).parent
    candidates = (package / "configs" / recipe, package.parents[1] / "configs" / recipe)
    return [folder for folder in candidates if folder.is_dir()]


def load_config(recipe: str, source: str, overrides: list[str] | None) -> Any:
    """The settings of a recipe, from a file, by name, or from a run folder."""
    from gradvac.lab.runs import RunFolder
    from gradvac.lab.training import config

    settings = recipe_named(recipe).settings
    path = Path(source)
    folder = RunFolder(path)
    if folder.is_run():
        require_run(path, recipe)
        return config.load(settings, folder.config, overrides or [])
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {folder.config.name}; give a config or a run folder."
        )
    return config.load(settings, source, overrides or [], folders=config_folders(recipe))


def train_run(recipe: str, source: str, overrides: list[str] | None, run: Path | None) -> None:
    """Train in the folder that was given, in the run itself, or in one named after the config."""
    from gradvac.lab.runs import RunFolder
    from gradvac.lab.training.writers import writer_class

    settings = load_config(recipe, source, overrides)
    for writer in settings.train.writers:
        writer_class(writer)  # before anything is prepared
    path = Path(source)
    named = path if RunFolder(path).is_run() else Path("runs") / path.stem
    if recipe_named(recipe).train(settings, run or named).reason == "interrupted":
        raise typer.Exit(130)


def require_run(run: Path, *recipes: str) -> Path:
    """Refuse what is not a run folder, or a run of another recipe than these, if any is given."""
    from gradvac.lab.runs import RunFolder

    folder = RunFolder(run)
    if not folder.is_run():
        raise ValueError(f"{run} is not a run folder: it has no {folder.config.name}.")
    if recipes and (trained := recipe_of(run)) not in recipes:
        raise ValueError(
            f"{run} is a run of `gradvac {trained}`, but this is for runs of "
            f"{' and '.join(f'`gradvac {recipe}`' for recipe in recipes)}."
        )
    return run
