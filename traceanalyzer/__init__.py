"""Measured against expected communication of Megatron-style training.

This module imports the standard library only, because it loads inside training jobs together with
``traceanalyzer.collectors``. The analysis lives in the submodules: ``run``, ``job``, ``diff``.
"""

__version__ = "0.1.0"
