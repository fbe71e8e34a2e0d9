"""Measurements that the documentation quotes: `.venv/bin/python -m scripts.measure.NAME`."""
