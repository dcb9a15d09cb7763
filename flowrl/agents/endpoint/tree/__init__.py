"""What a session asked and was answered, as trees of messages and prompts, and the token sequences of it."""

from flowrl.agents.endpoint.tree.message_tree import MessageTree
from flowrl.agents.endpoint.tree.raw_prompts import RawPrompts
from flowrl.agents.endpoint.tree.sampled_branches import Asked, SampledBranches

__all__ = ["Asked", "MessageTree", "RawPrompts", "SampledBranches"]
