"""``python -m traceanalyzer``: the command line without an installed script."""

from traceanalyzer.cli import main

if __name__ == "__main__":  # workers of an import read this file too
    main(prog_name="traceanalyzer")
