"""How fast messages and weights travel, in one machine and between two."""
