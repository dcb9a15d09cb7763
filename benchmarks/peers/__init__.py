"""flowrl beside other trainers, on one job."""
