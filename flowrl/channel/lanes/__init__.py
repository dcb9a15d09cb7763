"""The protocol of one lane and the waiting at its two ends."""
