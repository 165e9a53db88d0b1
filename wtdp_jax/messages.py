"""What an error may quote of a file."""


def printable(quoted: object) -> str:
    """Returns the text with escapes for whatever would end a line, or steer the terminal that shows it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(quoted))
