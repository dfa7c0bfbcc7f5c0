"""`python -m safetune` is the `safetune` command."""

from safetune.cli import main

if __name__ == "__main__":
    main(prog_name="safetune")
