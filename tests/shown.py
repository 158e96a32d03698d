"""A display whose text can be read afterwards."""

import io

from rich.console import Console

from gradvac.lab.training import Display


class Shown(Display):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=1000))

    @property
    def text(self) -> str:
        file = self.console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()
