"""Tokenizers, chat templates, and what they make of conversations and texts."""
