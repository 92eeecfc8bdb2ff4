"""What entry points print as one line, without a traceback: a person's mistake, or a loss that is not finite."""


class UserError(Exception):
    """Says what was given, what is allowed and what to do."""


class NotFinite(UserError):
    """A loss that is not a number, or infinite. `terms` are those of the loss."""

    def __init__(self, words: str, terms: dict[str, float]) -> None:
        super().__init__(words)
        self.terms = terms
