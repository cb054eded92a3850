"""Whisper's languages, by code and by name."""

from asrmask.errors import OptionError

# in the order of their tokens; only models with 51,866 tokens have "yue"
LANGUAGES = dict(
    pair.split(":")
    for pair in (  # noqa: SIM905
        "en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese "
        "pt:portuguese tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian "
        "id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay "
        "cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai ur:urdu "
        "hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak "
        "te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian "
        "kn:kannada et:estonian mk:macedonian br:breton eu:basque is:icelandic hy:armenian "
        "ne:nepali mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi "
        "pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali af:afrikaans oc:occitan "
        "ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao "
        "uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese "
        "sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese "
        "tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir jw:javanese su:sundanese "
        "yue:cantonese"
    ).split()
)
LANGUAGES["ht"] = "haitian creole"


# alternative names
ALIASES = {
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "moldavian": "ro",
    "moldovan": "ro",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}


TO_LANGUAGE_CODE = {name: code for code, name in LANGUAGES.items()} | ALIASES
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
