"""The only place with SQL; it returns domain values."""
