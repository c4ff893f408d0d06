"""The verbs: create, report, read, answer, cancel, expire. One transaction each, at the most."""
