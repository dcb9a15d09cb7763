"""Models, tokenizers and templates by name."""
