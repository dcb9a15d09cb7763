"""The mathematics of training: pure functions first, DeepSpeed (`engine`) and models (`model`) at the edge.

`settings`, `schedule` and the objectives of `loss` are plain data that a graph file can build without torch;
`advantage` and `batch.batch_stats` need only numpy. Nothing here imports ray or vllm.

`learner` uses the subpackages in the order in which a batch passes through them: `batch` (samples to tensors), `engine`
(ranks of a sharded model), `model` (tensors to logprobs or values), `loss`.
"""
