"""`python -m app` is `taskbroker`."""

from app.cli import main

main()
