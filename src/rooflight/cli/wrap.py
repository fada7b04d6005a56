"""Line breaks between words for text that comes in pieces, on a terminal that would break anywhere."""

from __future__ import annotations

from rich.cells import cell_len

TAB = 8


class WordWrap:
    """`add` turns the next piece into what to write.

    Nothing is held back: a word that reaches the edge is taken back and written again on the next line. The last
    column stays free, since terminals disagree about the cursor there.
    """

    def __init__(self, columns: int) -> None:
        self._width = max(columns - 1, 2)
        self._column = 0
        self._word = ""  # what was written since the last place where a line may break

    def add(self, text: str) -> str:
        return "".join(self._place(character) for character in text)

    def _place(self, character: str) -> str:
        if character == "\n":
            return self._start_line(character)
        cells = TAB - self._column % TAB if character == "\t" else cell_len(character)
        written = ""
        if self._column + cells > self._width:
            if character.isspace():
                return self._start_line("\n")
            # Scripts of wide characters break anywhere.
            written = self._start_line("\n") if cells == 2 else self._carry_over()
        self._column += cells
        self._word = "" if character.isspace() or cells == 2 else self._word + character
        return written + character

    def _start_line(self, written: str) -> str:
        self._column, self._word = 0, ""
        return written

    def _carry_over(self) -> str:
        """Move the unfinished word to the next line; one that fills the line alone is broken."""
        word, cells = self._word, cell_len(self._word)
        if not 0 < cells < self._column:
            return self._start_line("\n")
        self._column = cells
        return f"\033[{cells}D\033[K\n{word}"
