"""The languages that Whisper was trained on, by their codes and English names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unspool.errors import SettingError

_TABLE: Final = """
    en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese,
    tr turkish, pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi,
    fi finnish, vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish,
    hu hungarian, ta tamil, no norwegian, th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin,
    mi maori, ml malayalam, cy welsh, sk slovak, te telugu, fa persian, lv latvian, bn bengali, sr serbian,
    az azerbaijani, sl slovenian, kn kannada, et estonian, mk macedonian, br breton, eu basque, is icelandic,
    hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili, gl galician, mr marathi,
    pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali, af afrikaans, oc occitan, ka georgian,
    be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao, uz uzbek, fo faroese,
    ht haitian_creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish, my myanmar,
    bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
    jw javanese, su sundanese, yue cantonese
"""
_OTHER_NAMES: Final = {
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

NAMES: Final[Mapping[str, str]] = {
    code: name.replace("_", " ") for code, name in (item.split() for item in _TABLE.replace("\n", " ").split(","))
}
"""The name of each code."""

CODES: Final[Mapping[str, str]] = {**{name: code for code, name in NAMES.items()}, **_OTHER_NAMES}
"""The code of each name; some languages have several names."""

UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words no spaces divide."""


def find_language(language: str, known: Mapping[str, int]) -> str:
    """The token of a language (`<|en|>`) given as a code, a name or the token itself, if a model knows it."""
    if not isinstance(language, str):
        raise SettingError(f"`language` is a code ('en'), a name ('english') or a list of them, not {language!r:.40}")
    asked = language.strip().lower()
    token = asked if asked in known else f"<|{CODES.get(asked, asked)}|>"
    if token not in known:
        codes = [token.strip("<|>") for token in known]
        listed = ", ".join(f"{code} ({NAMES[code]})" if code in NAMES else code for code in codes)
        raise SettingError(
            f"`language`={language!r:.40} is not one of the {len(codes)} that this model knows: {listed}"
        )
    return token
