"""The SQL library: one documented view or macro per .sql file."""
