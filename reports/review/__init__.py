"""The review for people: HTML, Markdown and the terminal, each a pure function of the document traceanalyzer.review/1."""
