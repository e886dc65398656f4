"""What runs inside a throw-away guest: warm up, take one job, run it, report.

Only the standard library and pytest, for Python >= 3.9; the folder is shown read-only to the
guest and run there. `parent` is the trusted first process, `recorder` its child that runs tests,
`calls` the one that calls functions for held-out checks, `configuration` what is read of the
repository while it is pristine, `wire` the messages.
"""
