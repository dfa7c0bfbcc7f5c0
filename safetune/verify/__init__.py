"""Which program of a launch writes which element, found in Triton's interpreter.

A kernel and a launch enter; an `OverlapReport` leaves. Nothing is tuned or stored, and no tuning
imports this folder.
"""
