"""How ranks reach each other: one interface, and the simulated, torch.distributed and MPI ways to carry it out."""
