"""New weights on their way from the trainer to the nodes that read them: one backend for each transport."""
