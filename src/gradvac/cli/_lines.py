"""Lines that a command reads: all of them, whatever bytes they hold."""

from collections.abc import Iterable, Iterator


class Decoder:
    """Turns lines of bytes into text; what is not UTF-8 is replaced by marks.

    Attributes:
        num_replaced: Lines with such marks so far.
    """

    def __init__(self) -> None:
        self.num_replaced = 0

    def decode(self, lines: Iterable[bytes]) -> Iterator[str]:
        """The lines of a file, with their ends; a byte order mark is not part of the first."""
        for number, raw in enumerate(lines):
            encoding = "utf-8-sig" if number == 0 else "utf-8"
            try:
                yield raw.decode(encoding)
            except UnicodeDecodeError:
                self.num_replaced += 1
                yield raw.decode(encoding, errors="replace")
