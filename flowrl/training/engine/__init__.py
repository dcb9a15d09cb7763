"""DeepSpeed ZeRO: one engine for each rank, its optimizer, memory and checkpoints."""
