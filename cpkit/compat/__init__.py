"""Other engines' names over cpkit's planner and builders: `cpkit.compat.vllm`. Needs torch; nothing else here does."""
