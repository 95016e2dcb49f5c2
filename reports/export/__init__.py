"""A run as files for other programs: Perfetto's own format, Chrome's JSON, and tables as Parquet or CSV.

``tracks`` says once what lies on which track and when; ``perfetto`` and ``chrome`` write it down, ``tables`` writes views
and results of queries. Nothing here prints.
"""
