"""Gates of other papers."""
