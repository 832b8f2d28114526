"""`python -m tools.judge`: scores answers by a language model behind any OpenAI-compatible endpoint."""
