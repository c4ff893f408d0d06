"""Measurements, as ratios to a bare ASGI application; see docs/performance.md."""
