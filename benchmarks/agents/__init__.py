"""What episodes, environments and agents cost, and what faults cost them."""
