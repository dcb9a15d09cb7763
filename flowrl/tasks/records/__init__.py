"""Records of data files of any format, in memory or read where they stand."""
