"""Pictures of a graph: Mermaid text and SVG."""
