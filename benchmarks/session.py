"""Draw the terminal session that README shows, from a real run; `make session`.

    python benchmarks/session.py [FILE.svg]

It runs `docs/examples/softmax.py` twice on a terminal of 100 columns, with a store of its own: a
config crashes, the bar moves, a line stays; the second run measures nothing.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "docs" / "examples" / "softmax.py"
PICTURE = ROOT / "docs" / "figures" / "session.svg"
COLUMNS = 100

#: What moves the cursor or clears a line; what colours stays.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKhl]|\r")
_COUNT = re.compile(r" (\d+)/\d+ ")

#: Rich's, but for the fonts that it would load from elsewhere.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def run(store: Path) -> str:
    """Run the program on a terminal, and return what it was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    variables = {
        "SAFETUNE_CACHE_DIR": str(store),
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    sent = b""
    try:
        while data := os.read(ours, 65536):
            sent += data
    except OSError:  # the program has closed it
        pass
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{PROGRAM} ended with {process.returncode}:\n{sent.decode()[-2000:]}")
    return sent.decode()


def shown(sent: str) -> list[str]:
    """Return the last state of the bar that is not complete, and the lines that stayed."""
    pieces = [piece for piece in re.split(r"\n", _MOVES.sub("\n", sent)) if piece.strip()]
    bars = [piece for piece in pieces if "━" in piece and (match := _COUNT.search(piece)) and match]
    lines = [piece for piece in pieces if "━" not in piece and not _is_begun(piece)]
    counts = [int(_COUNT.search(bar)[1]) for bar in bars]  # type: ignore[index]
    full = max(counts, default=0)
    part = [bar for bar, count in zip(bars, counts, strict=True) if count < full]
    return [*(part or bars)[-1:], *lines]


def _is_begun(piece: str) -> bool:
    """Whether it is the bar before the first config is done."""
    return re.search(r" 0/\d+ ", piece) is not None


def draw(first: str, second: str) -> str:
    """Return the picture of two runs."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for sent in (first, second):
        console.print(Text.assemble(("$ ", "green"), f"python {PROGRAM.name}"))
        for line in shown(sent):
            console.print(Text.from_ansi(line), no_wrap="━" in line, crop=True)
    return console.export_svg(title="safetune", code_format=_FORMAT, unique_id="session")


def main() -> None:
    """Run twice, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        picture = draw(run(Path(folder)), run(Path(folder)))
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
