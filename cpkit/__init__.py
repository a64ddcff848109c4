"""cpkit plans, simulates, runs and checks context parallelism for sparse-attention language models."""

__version__ = "0.1.0"
