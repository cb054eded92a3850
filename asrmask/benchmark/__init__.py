"""Speed, memory and WER of speech-to-text systems on the same clips, with the same weights."""

from asrmask.extras import require

require(__name__, "matplotlib", "jinja2", "jiwer")
