"""One tuning: single flight, compile, measure, vote, choose.

In: a `TuningRequest`. Out: a `TuningResult`; every outcome is stored on the way. Runs in the
caller's process; configs run in a child.
"""
