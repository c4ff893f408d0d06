"""REST and inbound webhooks, towards tool servers."""
