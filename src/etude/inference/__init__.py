"""Engines: token ids in, sampled token ids with exact log-probs out."""
