"""Agents: conversations of many turns as token ids. A library; no graph uses it yet."""

from flowrl.agents.chat_template import ChatTemplate
from flowrl.agents.conversation import Conversation, TokenSequence
from flowrl.agents.examination import Examination, examine

__all__ = ["ChatTemplate", "Conversation", "Examination", "TokenSequence", "examine"]
