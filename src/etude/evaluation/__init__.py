"""Scores with intervals, over held-out tasks."""
