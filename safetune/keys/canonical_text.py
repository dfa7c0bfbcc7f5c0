"""The text of a function without comments, blank lines, docstrings and spacing.

This file needs only Python's tokenizer, so it also runs alone. Different versions tokenize
f-strings differently; the resulting text is the same. It is valid Python: one
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
    lines: list[str] = []
    line: list[tuple[int, str]] = []
    depth, begins_body = 0, False
    for kind, word in _tokens(text):
        if kind == tokenize.INDENT:
            depth += 1
        elif kind == tokenize.DEDENT:
            depth -= 1
        elif kind != tokenize.NEWLINE:
            line.append((kind, word))
        elif line:  # it is empty after a backslash alone
            words = [word for _, word in line]
            if not (begins_body and all(map(_is_plain_string, line))):
                lines.append(" " * depth + " ".join(words))
            is_definition = words[0] in ("def", "class") or words[:2] == ["async", "def"]
            begins_body = is_definition and words[-1] == ":"
            line = []
    return "\n".join(lines)


def _is_plain_string(token: tuple[int, str]) -> bool:
    kind, word = token
    quote = min((at for at in map(word.find, "'\"") if at >= 0), default=0)
    return kind == tokenize.STRING and word[:quote].lower() in _PLAIN_STRINGS


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the kind and the text of each token, a formatted string as one of them."""
    lines = text.split("\n")
    nested, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, word = token.type, token.string
        if kind == tokenize.ERRORTOKEN and word.isspace():  # before a letter that it does not know
            continue
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
