"""The folder that `safetune run` puts on PYTHONPATH: Python imports `sitecustomize` at start."""
