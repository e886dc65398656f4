"""Etude turns an open-weights model and your own repositories into a coding agent."""

__version__ = "0.1.0"
