"""From a vector's inputs to a compat call, and from its result to a vector's outputs: one adapter a file.

Each adapter takes the inputs as a namespace and returns the outputs as a dictionary. Where a file shows every rank, its
outputs are one entry a rank, and a rank that refuses gives the exception.
"""

from tests.golden_adapters import batches, indexer, ranks, slots, windows
from tests.golden_adapters.tensors import ADAPTERS, f32

PENDING = {
    "indexer_build": "waits for the indexer's metadata builder",
    "swa_build": "waits for the sliding-window metadata builder",
}
"""Vector files of functions that are not built yet, with the reason."""

__all__ = ["ADAPTERS", "PENDING", "batches", "f32", "indexer", "ranks", "slots", "windows"]
