"""What commands print, write and refuse."""
