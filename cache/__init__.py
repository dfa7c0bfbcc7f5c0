"""Shipped pre-tuned configs, one JSON file per GPU and kernel. Holds no code."""
