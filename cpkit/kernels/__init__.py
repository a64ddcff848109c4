"""Device computations, one concept a file: what it means, its reference in torch operations, and its entry."""
