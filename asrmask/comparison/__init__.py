"""Compare asrmask with other systems on the same weights: stages, tokens, times and text."""

from asrmask.extras import require

require(__name__, "jiwer", "jinja2")
