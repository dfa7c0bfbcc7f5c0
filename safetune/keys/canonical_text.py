"""The text of a function without comments, blank lines, docstrings and spacing.

This file needs only Python's tokenizer, so it also runs alone. Different versions tokenize
f-strings and some names differently; the resulting text is the same. It is valid Python: one
logical line per line, tokens separated by a space, one space of indentation per level. Texts with
different tokens stay different.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator

_IGNORED = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.TYPE_COMMENT}
)

#: Since Python 3.12 and 3.14, a formatted string is many tokens.
_STARTS = {getattr(tokenize, f"{kind}STRING_START", -1) for kind in "FT"}
_ENDS = {getattr(tokenize, f"{kind}STRING_END", -1) for kind in "FT"}

#: What stands before the quotes of a string that may be a docstring.
_PLAIN_STRINGS = ("", "r", "u")

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def canonical(text: str) -> str:
    """Return the canonical text of a `def` or a lambda.

    The first line of `text` begins with the function; the others are indented as in the file.

    Raises:
        SyntaxError, tokenize.TokenError: it is not Python.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith("lambda"):  # its lines may end anywhere
        words = [word for kind, word in _tokens(f"({text})") if kind != tokenize.NEWLINE]
        return " ".join(words[1:-1])
    lines = _Lines()
    for kind, word in _tokens(text):
        lines.add(kind, word)
    return "\n".join(lines.finished)


class _Lines:
    """Puts tokens together to logical lines, and leaves docstrings out."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self._line: list[str] = []  # its statements that have ended
        self._statement: list[tuple[int, str]] = []
        self._depth = self._brackets = 0
        self._is_header = False  # of a function or class
        self._begins_body = False

    def add(self, kind: int, word: str) -> None:
        """Take the next token."""
        if kind == tokenize.INDENT:
            self._depth += 1
        elif kind == tokenize.DEDENT:
            self._depth -= 1
        elif kind == tokenize.NEWLINE:
            self._end_statement("")
            if self._line:
                self.finished.append(" " * self._depth + " ".join(self._line))
            self._line, self._is_header = [], False
        elif word == ";" and not self._brackets:
            self._end_statement(word)
        else:
            self._add_word(kind, word)

    def _add_word(self, kind: int, word: str) -> None:
        if word in ("def", "class") and not self._line:
            self._is_header |= all(before == "async" for _, before in self._statement)
        self._statement.append((kind, word))
        if kind == tokenize.OP:
            self._brackets += (word in _OPENING) - (word in _CLOSING)
            if word == ":" and self._is_header and not self._brackets:
                self._end_statement("")
                self._is_header, self._begins_body = False, True

    def _end_statement(self, end: str) -> None:
        if not self._statement:
            return
        if not (self._begins_body and all(map(_is_plain_string, self._statement))):
            self._line += [word for _, word in self._statement]
            self._line += [end] if end else []
        self._statement, self._begins_body = [], False


def _is_plain_string(token: tuple[int, str]) -> bool:
    kind, word = token
    quote = min((at for at in map(word.find, "'\"") if at >= 0), default=0)
    return kind == tokenize.STRING and word[:quote].lower() in _PLAIN_STRINGS


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the kind and the text of each token, a formatted string as one of them."""
    lines = text.split("\n")
    name, end, nested, start = "", (0, 0), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, word = token.type, token.string
        if kind == tokenize.ERRORTOKEN and word.isspace():  # before a letter that it does not know
            continue
        if kind in (tokenize.NAME, tokenize.ERRORTOKEN) and not nested:
            if name and token.start != end:
                yield tokenize.NAME, name
                name = ""
            name, end = name + word, token.end  # to Python 3.11, some letters are an ERRORTOKEN
            continue
        if name:
            yield tokenize.NAME, name
            name = ""
        if kind in _STARTS:
            start, nested = start if nested else token.start, nested + 1
        elif kind in _ENDS:
            nested -= 1
            if not nested:
                yield tokenize.STRING, _between(lines, start, token.end)
        elif not nested and kind not in _IGNORED:
            yield kind, word


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two places, whose lines are counted from 1."""
    found = lines[start[0] - 1 : end[0]]
    found[-1] = found[-1][: end[1]]
    found[0] = found[0][start[1] :]
    return "\n".join(found)
