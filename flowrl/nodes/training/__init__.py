"""The trainer: a node whose replicas are the ZeRO-3 ranks."""
