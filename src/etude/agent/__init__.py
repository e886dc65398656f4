"""The harness: the same loop in practice and for people."""
