"""Models and datasets by their names on the Hub."""
