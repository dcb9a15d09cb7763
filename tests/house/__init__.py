"""The repository itself: imports, words, documents, requirements, and which tests `make test` runs."""
