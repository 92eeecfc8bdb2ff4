"""Reading run records and drawing what they hold."""
