"""The trainer: a node whose replicas are the ZeRO ranks."""
