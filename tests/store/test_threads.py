"""Threads that read their first choice, or their first answer of a child, at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: In forked processes, in each of which no thread has used the types yet. A process without the
#: precautions crashed in one of three.
THREADS = """
import importlib, json, os, sys, threading
from pathlib import Path
sys.setswitchinterval(1e-6)
name, pack = sys.argv[1:]
module = importlib.import_module(name)
import msgspec
content = json.loads(Path(pack).read_text())
if name.endswith("protocol"):
    content = json.loads(json.dumps(module.answer_header(module.DONE, 1)))

def work(start, failed):
    start.wait()
    try:
        module.answer_of(content, 1) if name.endswith("protocol") else module.entries(content)
    except BaseException:
        failed.append(True)

for _ in range(20):
    if not (child := os.fork()):
        start, failed = threading.Barrier(16), []
        threads = [threading.Thread(target=work, args=(start, failed)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(bool(failed))
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("name", ["safetune.store.schema", "safetune.both.protocol"])
def test_they_do_not_crash_the_process(name: str) -> None:
    content = sorted((ROOT / "cache").glob("*.json"))[0]
    command = [sys.executable, "-c", THREADS, name, str(content)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
