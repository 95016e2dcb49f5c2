"""What runs inside the training job: standard library and torch, nothing else.

Importing this package imports neither torch nor any other third-party module; torch is imported by the functions that
need it.
"""
