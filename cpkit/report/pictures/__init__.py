"""Pictures of plans, sizes and sweeps: each file makes one, from plain values to a PNG or SVG; matplotlib draws."""
