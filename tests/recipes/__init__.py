"""The graphs in graphs/, and the options that they share."""
