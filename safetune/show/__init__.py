"""What a person sees of stored choices: tables for a terminal, a notebook and a page."""
