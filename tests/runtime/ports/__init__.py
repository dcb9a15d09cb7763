"""Ports of a replica: invocations, joins, requests, leases, stalls."""
