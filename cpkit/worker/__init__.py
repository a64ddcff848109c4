"""The rank program: one step of one layer on one rank, over whichever comm it is given."""
