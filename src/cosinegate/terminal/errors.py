"""Errors that entry points print as one line, without a traceback."""


class UserError(Exception):
    """A person's mistake: what was given, what is allowed and what to do."""


class NotFinite(UserError):
    """A loss that is nan or infinite; `terms` are the loss terms."""

    def __init__(self, words: str, terms: dict[str, float]) -> None:
        super().__init__(words)
        self.terms = terms
