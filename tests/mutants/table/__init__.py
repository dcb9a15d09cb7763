"""The faults of `make mutants`, by the part of flowrl that they are in. Where they are found does not depend on it."""
