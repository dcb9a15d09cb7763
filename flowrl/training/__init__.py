"""The mathematics of training: pure functions first, DeepSpeed (`zero`) and models at the edge.

What a graph file needs (`recipes`, `schedule`, `settings`) and what cheap nodes need (`packing`,
`advantages`, `tally`) is free of torch; nothing here imports ray or vllm.
"""
