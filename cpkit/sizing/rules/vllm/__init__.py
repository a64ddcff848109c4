"""What vLLM supports and refuses."""
