"""Lines of a file that arrives by pieces, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator


class Lines:
    """Puts whole lines together; of one that grows beyond the bound nothing is kept, and it is left out when it ends.

    Args:
        max_bytes: Longest line, without its line feed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._too_long = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of the unfinished line that are held."""
        return len(self._rest)

    def restart(self) -> None:
        """Forget the unfinished line: the file was replaced, or another one follows."""
        self._rest, self._too_long = b"", False

    def feed(self, data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
        """The lines that end in a piece, each with the position after its line feed.

        Args:
            data: The piece.
            start: Position of its first byte; pieces follow each other without a gap.
        """
        *ended, rest = data.split(b"\n")
        at = start
        for line in ended:
            at += len(line) + 1
            whole, too_long = self._rest + line, self._too_long or len(self._rest) + len(line) > self._max_bytes
            self.restart()
            if not too_long:
                yield whole, at
        if self._too_long or len(self._rest) + len(rest) > self._max_bytes:
            self._rest, self._too_long = b"", True
        else:
            self._rest += rest
