"""Commands, and what people see of a run."""
