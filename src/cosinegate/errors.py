"""The one exception for a person's mistake: the entry points print it as one line, without a traceback."""


class UserError(Exception):
    """Says what was given, what is allowed and what to do."""
