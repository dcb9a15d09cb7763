"""The APIs that the endpoint speaks: how a body is read, and how an answer and a stream are written."""

from flowrl.agents.endpoint.apis.anthropic_messages import AnthropicMessages
from flowrl.agents.endpoint.apis.api import Api, ApiCall, CallAnswer, Choice
from flowrl.agents.endpoint.apis.chat_completions import ChatCompletions
from flowrl.agents.endpoint.apis.openai_responses import OpenAIResponses
from flowrl.agents.endpoint.apis.text_completions import TextCompletions

__all__ = [
    "AnthropicMessages",
    "Api",
    "ApiCall",
    "CallAnswer",
    "ChatCompletions",
    "Choice",
    "OpenAIResponses",
    "TextCompletions",
]
