"""Recipes that ship with Etude, one TOML file each."""
