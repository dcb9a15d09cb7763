"""An HTTP endpoint for agent code, in front of whatever samples. A library; no graph uses it yet."""
