"""Metadata builders: from one rank's batch to everything the kernels of a step take, at fixed addresses."""
