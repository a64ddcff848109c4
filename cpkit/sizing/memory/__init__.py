"""What a rank holds: weights, caches, buffers; and how many tokens fit besides."""
