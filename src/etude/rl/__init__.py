"""The learning loop: groups, curriculum, steps."""
