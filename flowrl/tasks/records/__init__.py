"""Records of data files of any format, kept in memory or read from the files."""
