"""Verified practice made from real repositories, and its grading."""
