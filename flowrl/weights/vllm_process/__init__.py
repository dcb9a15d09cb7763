"""What runs inside the processes that vLLM starts."""
