"""A session's requests and answers, as trees of messages and prompts, and their token sequences."""

from flowrl.agents.endpoint.tree.message_tree import MessageTree
from flowrl.agents.endpoint.tree.raw_prompts import RawPrompts
from flowrl.agents.endpoint.tree.sampled_branches import Asked, SampledBranches

__all__ = ["Asked", "MessageTree", "RawPrompts", "SampledBranches"]
