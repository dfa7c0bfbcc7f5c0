"""The miss path: from a call to a choice, with every candidate in a subprocess."""
