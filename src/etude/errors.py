"""The one error that a person is meant to read."""


class EtudeError(Exception):
    """Bad input or a missing part of the machine, told in one sentence.

    The message says what was wrong, where, and what to do. The command line prints it without a
    traceback and exits with `exit_code`. Every other exception is a bug.
    """

    exit_code: int = 2
