"""Stored choices for people: tables for a terminal, a notebook and a page."""
