"""Everything that follows from a declared graph without running it: checks, derived numbers, placement, the plan."""
