"""Who may do what: rules, modes, approvals and hooks of a person's session."""
