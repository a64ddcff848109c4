"""Which decode steps a captured graph of a builder's kernels can serve."""

from enum import Enum


class GraphSupport(Enum):
    """Batches that replay one captured graph of the same padded size."""

    UNIFORM = "decodes of one query length"
    ALWAYS = "any mix of query lengths"
