"""Tokenizers and chat templates, and the token ids of conversations and texts."""
