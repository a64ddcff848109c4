"""Replays of a trace: loop (plan and check every step), record (what is kept of one), result (of all)."""
