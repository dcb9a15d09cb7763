"""Agents: conversations of many turns as token ids, and what replies say."""

from flowrl.agents.call_parser import ParsedReply, ReplyParser, parser_problems, reply_parser
from flowrl.agents.chat_template import ChatTemplate
from flowrl.agents.conversation import Conversation, History, TokenSequence
from flowrl.agents.examination import Examination, examine

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Examination",
    "History",
    "ParsedReply",
    "ReplyParser",
    "TokenSequence",
    "examine",
    "parser_problems",
    "reply_parser",
]
