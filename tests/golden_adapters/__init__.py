"""From a vector's inputs to a compat call, and from its result to a vector's outputs: one adapter a file.

Each adapter takes the inputs as a namespace and returns the outputs as a dictionary. Where a file shows every rank, its
outputs are one entry a rank, and a rank that refuses gives the exception.
"""

from tests.golden_adapters import batches, builders, indexer, ranks, slots, windows
from tests.golden_adapters.tensors import ADAPTERS, f32

__all__ = ["ADAPTERS", "batches", "builders", "f32", "indexer", "ranks", "slots", "windows"]
