"""`python -m safetune` is the `safetune` command."""

import os
import sys

if __name__ == "__main__":
    # `-m` puts the working directory first, where a folder may have the name of a library. The
    # command does not; only what is imported from there stays.
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if not safe and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]
    from safetune.cli import main

    main(prog_name="safetune")
