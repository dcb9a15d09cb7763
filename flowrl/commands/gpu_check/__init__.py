"""`make gpu-check`: what only a machine with GPUs can show, in stages."""
