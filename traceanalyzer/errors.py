"""The exceptions a user can act on. Everything else that escapes is a bug.

TraceAnalyzerError          what went wrong, where, and what to do next; exit code 2 in the CLI
+-- JobError                a job description is wrong: names the field, its value and the rule
+-- InputError              an input file cannot be read or must not be trusted
+-- SchemaError             a Parquet file is not a run table, or its schema is newer than this program
"""


class TraceAnalyzerError(Exception):
    """An error with a message for the user: what, where, what to do next."""


class JobError(TraceAnalyzerError):
    """A job description that cannot be used; the message names field, value and rule."""


class InputError(TraceAnalyzerError):
    """An input file that cannot be read or must not be trusted; the message says why and what to do."""


class SchemaError(TraceAnalyzerError):
    """A Parquet file that is not a run table this program can read."""
