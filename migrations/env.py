"""Alembic's entry: migrates on the connection that `app.db.migrations` hands over."""

from alembic import context

from app.db.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_server_default=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
