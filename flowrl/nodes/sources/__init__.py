"""Where groups enter the graph: rows of tasks, data files and environments; samples that the data give."""
