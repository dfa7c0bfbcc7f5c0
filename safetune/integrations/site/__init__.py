"""A folder for PYTHONPATH: `safetune run` has every Python below it start with `sitecustomize`."""
