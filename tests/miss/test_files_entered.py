"""How many files of the product a reader has to open to follow a first miss, or a stored choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: Prints each file of the product with a function that runs for one launch, in this process and
#: not for an import.
SCRIPT = """
import sys, threading
from pathlib import Path
import torch, triton, triton.language as tl
import safetune

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
kernel = safetune.safetune(configs=configs, key=["n"])(copy_kernel)
product, entered = str(Path(safetune.__file__).parent), set()

def called(frame, event, _):
    name = frame.f_code.co_filename
    if event != "call" or not name.startswith(product) or name in entered:
        return
    outer = frame
    while outer is not None and outer.f_code.co_name != "<module>":
        outer = outer.f_back
    if outer is None or outer.f_code.co_filename == __file__:
        entered.add(name)

dst, src = torch.zeros(100), torch.ones(100)
threading.setprofile(called)
sys.setprofile(called)
kernel[(7,)](dst, src, 100)
sys.setprofile(None)
threading.setprofile(None)
assert torch.equal(dst, src)
print(*sorted(name.removeprefix(product + "/") for name in entered), sep="\\n")
"""


def test_a_first_miss_and_a_stored_choice_enter_few_files(
    tmp_path: Path, fresh_process: FreshProcess
) -> None:
    """They were 74 and 36. A file is entered only where it has work to do: another config after a
    failed launch, copies on a device, addresses among the arguments.
    """
    script = tmp_path / "launch.py"
    script.write_text(SCRIPT)
    entered = [fresh_process(script, env={"SAFETUNE_LOG": "quiet"}) for _ in range(2)]
    assert [done.stderr for done in entered] == ["", ""]
    miss, stored = (done.stdout.split() for done in entered)
    miss = [name for name in miss if name != "messages.py"]  # for tunings that take over 2 s
    assert len(miss) <= 45, "\n".join(miss)
    assert len(stored) <= 25, "\n".join(stored)
    assert "miss/resolve.py" in miss, "what is counted"
    assert "tuning/tuner.py" in {*miss} - {*stored}
