"""From records to the rows of a task."""
