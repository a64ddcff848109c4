"""How long a step takes on a chip, each number with its source."""
