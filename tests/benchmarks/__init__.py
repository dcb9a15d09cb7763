"""What the benchmarks make of their figures, without measuring."""
