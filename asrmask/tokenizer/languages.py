"""Whisper's languages, by code and by name."""

from asrmask import assets
from asrmask.errors import OptionError

# code → name, in the order of their tokens; only models with 51,866 tokens have "yue"
LANGUAGES: dict[str, str] = assets.table("tokenizer.py", "LANGUAGES")
OTHER_NAMES = (
    "burmese:my castilian:es flemish:nl haitian:ht letzeburgesch:lb mandarin:zh moldavian:ro "
    "moldovan:ro panjabi:pa pushto:ps sinhalese:si valencian:ca"
)
TO_LANGUAGE_CODE = {name: code for code, name in LANGUAGES.items()}
TO_LANGUAGE_CODE |= dict(pair.split(":") for pair in OTHER_NAMES.split())
# languages written without spaces between words
UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}


def language_code(language: str) -> str:
    """Return the code of a language given by code or English name, in upper or lower case."""
    name = language.lower()
    code = name if name in LANGUAGES else TO_LANGUAGE_CODE.get(name)
    if code is None:
        raise OptionError(
            f"language must be a code or a name that Whisper knows (en, English, …), got {language}"
        )
    return code
