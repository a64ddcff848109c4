"""Runs: which steps, of which layers, executed by all ranks of a comm, verified and told."""
