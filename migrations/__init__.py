"""Alembic's revisions of the schema in `app/db/schema.py`."""
