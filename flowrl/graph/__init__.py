"""Declaring a graph: nodes, ports, dispatch rules; loading graph files and their options."""
