"""What a user sees while a run trains: a progress bar on a terminal, lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)


class Display:
    """A progress bar with loss, tokens/s and time left; without a terminal, a line per log entry.

    Args:
        console: Where to write; None: standard output.
        quiet: Show only messages.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._quiet = quiet
        self._progress: Progress | None = None

    def say(self, message: str) -> None:
        """Print a message; above the bar, if there is one."""
        self.console.print(message, markup=False)

    def open(self, step: int, max_steps: int) -> None:
        """Begin at a step."""
        self._max_steps = max_steps
        if self._quiet or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=max_steps, completed=step, shown="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        """Show a log entry."""
        shown = (
            f"loss {values['train/loss']:.4f}  lr {values['train/lr']:.2e}  "
            f"{values['train/tokens_per_second']:,.0f} tokens/s  {_duration(seconds_left)} left"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
        elif not self._quiet:
            self.say(f"step {step}/{self._max_steps}  {shown}")

    def close(self) -> None:
        """Stop the bar where it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
