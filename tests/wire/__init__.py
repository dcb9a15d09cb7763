"""How messages travel: lanes, edges, endpoints, connections, and the ports of a replica."""
