"""The mathematics of training: pure functions first, DeepSpeed (`engine`) and models (`model`) at the edge.

`settings`, `layouts`, `memory` and the objectives of `loss` are plain data that a graph file can build without torch;
`advantages` and `batch_stats` need only numpy. Nothing here imports ray or vllm.

`learner` trains: a piece of a batch goes through `micro_batches` (samples to tensors), `model` (tensors to logprobs or
values), `loss` and `engine` (the ranks of a sharded model). `scoring_models` are models that only score.
"""
