"""The two rules of English that filled-in wordings need."""

import re

_ARTICLE = re.compile(r"\b([Aa]) (?=(?!use)[aeiou])")


def with_articles(text: str) -> str:
    """Write "an" where "a" stands before a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


def capitalised(text: str) -> str:
    """The text with its first letter large, the others as they are."""
    return text[0].upper() + text[1:]
