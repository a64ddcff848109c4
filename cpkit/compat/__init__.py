"""Other engines' function names over cpkit's planner: `cpkit.compat.vllm`. Needs torch; nothing else here does."""
