"""The mathematics of training: pure functions first, DeepSpeed (`zero`) and models at the edge.

Only `packing` and `advantages` are free of torch; nothing here imports ray or vllm.
"""
