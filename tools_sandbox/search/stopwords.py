"""Words of a query that do not help to find anything."""

_ENGLISH = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)  # the list of Lucene's English analyzer
_QUESTIONS = "who whom whose what which when where why how did does do were has have had can many much"

IGNORED_IN_QUERIES = frozenset(f"{_ENGLISH} {_QUESTIONS}".split())
