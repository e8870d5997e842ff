"""A guess at the language of a text, from its letters and words alone.

The script of the letters decides, and for Latin letters the commonest words of a few languages.
That is enough to see or drop what nobody meant to have, and less than a trained classifier knows:
short texts, lists and languages that are close to each other are often taken wrongly.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_WORD = re.compile(r"\w+")
_SCRIPTS = {
    "LATIN": "Latin",
    "CYRILLIC": "Cyrillic",
    "GREEK": "Greek",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "THAI": "Thai",
    "BENGALI": "Bengali",
    "TAMIL": "Tamil",
    "GEORGIAN": "Georgian",
    "ARMENIAN": "Armenian",
}
"""Scripts by the first word of the names of their letters."""
_COMMON = {
    "English": "the of and to in is that was for with it as on by",
    "German": "der die und das ist nicht mit von den ein zu auf des dem",
    "French": "le la les et des est dans que pour une qui pas sur au",
    "Spanish": "el los las de que y en un por con una para es del",
    "Portuguese": "o os as de que e em um uma não para com do da",
    "Italian": "il che di e la non per un è della sono del con gli",
    "Dutch": "de het een en van niet dat op zijn met voor is te aan",
    "Swedish": "och att det som en på är av för med den till inte om",
    "Polish": "i w nie na się z do to jest że o jak po przez",
    "Turkish": "ve bir bu da için ile de olarak daha olan çok gibi kadar en",
    "Indonesian": "yang dan di dengan untuk dari pada adalah ini dalam tidak itu ke oleh",
    "Finnish": "ja on ei että se oli hän mutta kun ovat joka myös niin kuin",
}
CODES = {
    "en": "English", "de": "German", "fr": "French", "es": "Spanish", "pt": "Portuguese",
    "it": "Italian", "nl": "Dutch", "sv": "Swedish", "pl": "Polish", "tr": "Turkish",
    "id": "Indonesian", "fi": "Finnish", "zh": "Chinese", "ja": "Japanese", "ko": "Korean",
}  # fmt: skip
_ENOUGH = 0.06
"""The share of words of a language's commonest ones from which a text counts as of it."""

LATIN = "Latin letters"
"""The language of a text in Latin letters whose words are not known."""
NO_LETTERS = "no letters"
OTHER = "another script"


def language_of(text: str) -> str:
    """A guess at the language of a text, or its script."""
    letters = [character for character in text[:4000] if character.isalpha()]
    if not letters:
        return NO_LETTERS
    names = (unicodedata.name(letter, "").partition(" ")[0] for letter in letters[:500])
    scripts = Counter(_SCRIPTS.get(name, OTHER) for name in names)
    if scripts["Japanese"]:
        return "Japanese"
    script, _ = scripts.most_common(1)[0]
    if script != "Latin":
        return script
    words = _WORD.findall(text[:4000].lower())
    shares = {
        language: sum(word in known for word in words) / max(len(words), 1)
        for language, known in _COMMON_WORDS.items()
    }
    best = max(shares, key=lambda language: shares[language])
    return best if shares[best] >= _ENOUGH else LATIN


_COMMON_WORDS = {language: frozenset(words.split()) for language, words in _COMMON.items()}


def known_languages() -> list[str]:
    """Everything that a text may be taken for."""
    scripts = [script for script in _SCRIPTS.values() if script != "Latin"]
    return list(dict.fromkeys((*_COMMON, *scripts, LATIN, NO_LETTERS, OTHER)))
