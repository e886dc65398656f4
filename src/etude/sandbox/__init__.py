"""Workspaces: where everything that a model or a repository wants to run is run."""
