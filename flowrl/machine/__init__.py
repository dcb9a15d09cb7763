"""What flowrl asks of the machine that it runs on: its CPU, disks, processes and proxies."""
