"""A notebook without its server: cells run by IPython's shell, which keeps what they display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

NOTEBOOK = '''
import json, os, sys
os.environ["IPYTHONDIR"], gate = sys.argv[1:]
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from safetune.miss import progress

progress.DELAY_S, progress._REFRESH_S = 0.0, 0.01

class Publisher(CapturingDisplayPublisher):
    """The config that waits goes on when the bar shows that two are done."""

    def publish(self, data, *args, **options):
        super().publish(data, *args, **options)
        if 'value="2"' in data.get("text/html", "") and not os.path.isfile(gate):
            writer = os.open(gate, os.O_WRONLY)
            os.unlink(gate)
            open(gate, "x").close()
            os.close(writer)

shell = InteractiveShell.instance(display_pub_class=Publisher)
shell.history_manager.enabled = False
shell.kernel = object()  # as that of ipykernel has one
shell.user_ns["gate"] = gate

def cell(source):
    shell.display_pub.outputs.clear()
    shell.run_cell(source, store_history=True).raise_error()
    return list(shell.display_pub.outputs)

cell("""
import os, torch, triton, triton.language as tl
from safetune import safetune
caller = os.getpid()
def wait(arguments):
    if os.getpid() != caller:
        with open(gate) as file:
            file.read()
hooks = (None, None, wait)
configs = [triton.Config({"BLOCK": 32 << i}, pre_hook=hook) for i, hook in enumerate(hooks)]

@safetune(configs=configs, key=["n"], run_timeout_s=1000.0)
@triton.jit
def kernel(dst, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, offset, mask=offset < n)
""")
shown = {"tuning": cell("kernel[(4,)](torch.zeros(100), 100)"), "show": cell("kernel.show()")}
shown["value"] = shell.display_formatter.format(shell.user_ns["kernel"])[0]
print(json.dumps(shown, default=str))
'''


def test_a_bar_that_moves_and_a_table(fresh_process: FreshProcess, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    import os

    os.mkfifo(tmp_path / "gate")

    done = fresh_process(NOTEBOOK, tmp_path / "ipython", tmp_path / "gate", warm=True)

    assert "IProgress" not in done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    first, *updates = shown["tuning"]
    assert not first["update"]
    assert {update["update"] for update in updates} == {True}
    (identity,) = {output["transient"]["display_id"] for output in shown["tuning"]}
    assert identity
    pages = [output["data"]["text/html"] for output in shown["tuning"]]
    assert any(page.startswith('<progress value="2" max="3"></progress> <code>') for page in pages)
    assert any("kernel 2/3, best " in output["data"]["text/plain"] for output in updates)
    assert pages[-1] == "", "it is gone at the end"
    (table,) = shown["show"]
    assert table["data"]["text/html"] == shown["value"]["text/html"]
    for words in ("kernel", "choice", "3: 3 timed", "verdict", "read by the body"):
        assert words in table["data"]["text/html"]
    assert "<script" not in table["data"]["text/html"]
