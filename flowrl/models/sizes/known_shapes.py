"""The shape of a policy's model, as far as it is known without loading anything."""

from __future__ import annotations

from flowrl.machine.disk import user_path
from flowrl.models.find_model import known_directory
from flowrl.models.policy import CHARACTER_MODELS, Policy
from flowrl.training.memory import ModelShape, read_shape

CHARACTER_VOCABULARY = 261
CHARACTER_SHAPE = ModelShape(128, 2, 4, 4, 32, 256, CHARACTER_VOCABULARY, tied=True, biased=True, dtype="float32")
SMOLLM2_SHAPE = ModelShape(576, 30, 9, 3, 64, 1536, 49152, tied=True)


def known_shape(policy: Policy) -> ModelShape | None:
    """The shape of a built-in model, of a model directory, or of a config.json; None if there is none to read.

    A path to a config.json names a model that is not on this machine, only for `flowrl check`.
    """
    if policy.model in CHARACTER_MODELS:
        return CHARACTER_SHAPE
    if policy.model == "smollm2":
        return SMOLLM2_SHAPE
    if policy.model.endswith(".json"):
        return read_shape(user_path(policy.model))
    directory = known_directory(policy)
    return read_shape(directory) if directory is not None else None
