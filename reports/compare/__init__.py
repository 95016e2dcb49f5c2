"""The comparison of two runs as people see it: terminal, Markdown and a page, all of the document traceanalyzer.compare/1."""
