"""The batcher: batches of whole groups, and statistics over them."""
