"""Pure functions of results: terminal, JSON, Markdown, HTML."""
