"""The node whose episodes are played by programs that reach the policy over HTTP."""
