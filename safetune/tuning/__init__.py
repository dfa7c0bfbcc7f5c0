"""One tuning: from a call without a choice to a choice, with every config run in a child process.

A `TuningRequest` enters; a `TuningResult` leaves, and every outcome is stored on the way. Runs in
the caller's process.
"""
