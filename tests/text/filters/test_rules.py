"""Each rule of the filters with a document that it drops and one at its limit that it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.text.filters.build import FilterPlan, Filters
from gristmill.text.filters.settings import parse_filters
from gristmill.text.sources.source import Reason, Value

GOOD = "The cat that we have is with the dog of the house, and to be fair it is happy there. "


def judge(settings: str, text: str, folder: Path, **fields: str) -> Value:
    """What filters with the settings of a file say of a text."""
    file = folder / "filters.toml"
    file.write_text(settings, encoding="utf-8")
    return Filters(FilterPlan(parse_filters([str(file)]))).judge(text, fields)


def reason(settings: str, text: str, folder: Path, **fields: str) -> str | None:
    value = judge(settings, text, folder, **fields)
    return value.value if isinstance(value, Reason) else None


def several(count: int) -> str:
    """Different sentences."""
    return " ".join(f"Number {number} is the house of the cat we have." for number in range(count))


QUALITY = "[gopher-quality]\n"
RULES = [
    (QUALITY, "the cat sat " * 16 + "with", None, "too few words"),
    (QUALITY + "max_words = 60\n", "the cats have " * 20, "the cats have " * 21, "too many words"),
    (QUALITY, "the and for " * 20, "the and of " * 20, "words too short"),
    (QUALITY, "the and wordswords " * 20, "the and with " + "abcdefghijkl " * 60, "words too long"),
    (
        QUALITY,
        "the and have that cats word with both same # " * 10,
        "the and have cats # " * 20,
        "too many #",
    ),
    (QUALITY, "the and of cats " * 20, "the and have ... " * 20, "too many ellipses"),
    (
        QUALITY,
        "- the cats have it all\n" * 18 + "and dogs have it\n" * 2,
        "- the cats have it all\n" * 18 + "• the cats have it all\nand dogs have\n",
        "too many lines with bullets",
    ),
    (
        QUALITY + "max_symbols = 0\n",
        "the cats...\n" * 3 + "and dogs have one\n" * 17,
        "the cats have...\n" * 7 + "and dogs of…\n" * 13,
        "too many lines that end with an ellipsis",
    ),
    (
        QUALITY,
        "the cats and have 123 " * 20,
        "the cats and 456 123 " * 20,
        "too few words with letters",
    ),
    (QUALITY, "the dogs and cats " * 20, "the dogs or cats " * 20, "too few stop words"),
    (
        "[gopher-repetition]\ntop = {}\nduplicate = {}\nmax_line_characters = 0\n",
        "\n".join(f"line {n % 7}" for n in range(10)),
        "\n".join(f"line {n % 6}" for n in range(10)),
        "duplicate lines",
    ),
    (
        "[gopher-repetition]\ntop = {}\nduplicate = {}\nmax_lines = 0\n"
        "max_paragraph_characters = 0\n",
        "\n\n".join(f"line {n % 7}" for n in range(10)) + "x" * 80,
        "\n\n".join(f"line {n % 6}" for n in range(10)),
        "duplicate paragraphs",
    ),
    (
        "[gopher-repetition]\ntop = {2 = 0.2}\nduplicate = {}\n",
        " ".join(f"word{n} thing{n}" for n in range(50)),
        " ".join(f"word{n} same thing" for n in range(50)),
        "top 2-gram",
    ),
    (
        "[gopher-repetition]\ntop = {}\nduplicate = {5 = 0.15}\n",
        several(3) + " ".join(f"w{n}" for n in range(400)),
        several(30),
        "duplicate 5-grams",
    ),
    ("[c4]\n", "One two three. " * 5, "One two three. " * 4, "too few sentences"),
    ("[c4]\n", GOOD * 5, GOOD * 5 + "\nThis is Lorem Ipsum text.", "lorem ipsum"),
    ("[c4]\n", GOOD * 5 + "\n{ is no line", GOOD * 5 + "\nThis { is one.", "curly bracket"),
    (
        "[fineweb]\n",
        several(1) + "\nNo end but one of two",
        "A line without any mark at its end that is long enough",
        "too few lines end with punctuation",
    ),
    (
        "[fineweb]\nmax_newlines = 9\n",
        "\n".join([f"Short line {n}." for n in range(67)] + [f"{n} {GOOD}" for n in range(33)]),
        "\n".join([f"Short line {n}." for n in range(68)] + [f"{n} {GOOD}" for n in range(32)]),
        "too many short lines",
    ),
    (
        "[fineweb]\n",
        several(40) + "\n" + several(41),
        several(3) + "\n" + several(3),
        "characters of duplicate lines",
    ),
    (
        "[fineweb]\nshort_line = 3\n",
        "\n".join(f"line {n} here." for n in range(90)),
        "\n".join(f"line{n}." for n in range(90)),
        "too many line ends",
    ),
    ("[length]\nmin_characters = 3\n", "abc", "ab", "too few characters"),
    ("[length]\nmax_characters = 3\n", "abc", "abcd", "too many characters"),
    ("[length]\nmin_words = 2\n", "a b", "ab", "too few words"),
    ("[length]\nmax_words = 2\n", "a b", "a b c", "too many words"),
    (
        "[language]\nlanguages = ['en']\n",
        GOOD,
        "Der Hund und die Katze sind nicht im Haus",
        "German",
    ),
    ("[language]\nlanguages = 'Cyrillic'\n", "Привет мир", GOOD, "English"),
    (
        "[language]\nlanguages = 'English'\nmin_letters = 0.8\n",
        GOOD,
        GOOD + "1" * 40,
        "too few letters",
    ),
    (
        "[words]\nwords = ['bad', 'very wrong']\n",
        "badly very  wrong",
        "It is VERY WRONG.",
        "listed words",
    ),
    ("[words]\nwords = ['bad']\nmax_count = 1\n", "a bad one", "a bad, bad one", "listed words"),
    ("[regex]\ndrop = ['x{3}']\n", "xx x", "axxxb", "x{3}"),
    ("[regex]\nkeep = ['[0-9]', '!']\n", "a1", "a", "nothing to keep it for"),
]


@pytest.mark.parametrize(("settings", "kept", "dropped", "rule"), RULES, ids=[r[3] for r in RULES])
def test_rule(settings: str, kept: str, dropped: str | None, rule: str, tmp_path: Path) -> None:
    name = settings[1 : settings.index("]")]
    if rule == "too few words" and name == "gopher-quality":
        assert reason(settings, f"{kept} dots.", tmp_path) is None
        assert reason(settings, kept, tmp_path) == "gopher-quality: too few words"
        return
    assert dropped is not None
    assert reason(settings, kept, tmp_path) is None
    assert reason(settings, dropped, tmp_path) == f"{name}: {rule}"


def test_c4_leaves_sentences(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "Home | About",
            "  The first sentence of a page.[1] And [edit]a second one.  ",
            "Two words.",
            "We use cookies on all of our pages.",
            "Please enable Javascript to see this page.",
            "To be continued on the next page...",
            f"A word of a thousand letters and one: {'x' * 1001}.",
            f"A word of a thousand letters: {'x' * 999}.",
            'He asked "Is this the end of it?"',
            "No, it is not the end! Not at all.",
        ]
    )
    left = judge("[c4]\n", text, tmp_path)
    assert left == "\n".join(
        [
            "The first sentence of a page. And a second one.",
            f"A word of a thousand letters: {'x' * 999}.",
            'He asked "Is this the end of it?"',
            "No, it is not the end! Not at all.",
        ]
    )
    loose = "terminal_punctuation = false\nmin_line_words = 0\nmax_word = 0\npolicy = false\n"
    loose += "javascript = false\nremove_citations = false\nmin_sentences = 0\n"
    lines = [line.strip() for line in text.splitlines()]
    assert judge(f"[c4]\n{loose}", text, tmp_path) == "\n".join(
        line for line in lines if not line.endswith("...") or line
    )
    assert reason("[c4]\nmin_sentences = 0\n", "menu", tmp_path) == "nothing left after filtering"


def test_samples_are_cut(tmp_path: Path) -> None:
    value = judge("[length]\nmax_words = 1\n", "word " * 1000, tmp_path)
    assert isinstance(value, Reason)
    assert value.sample == ("word " * 1000)[:400]


def test_urls(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# a list\nwww.Bad.com\nsome.org/news/\n\n")
    file = f"[url]\nfile = '{tmp_path}/list.txt'\nwords = ['casino']\n"
    for address, why in {
        "https://good.com/a": None,
        "https://bad.com": "blocked address",
        "http://user@www.bad.com:80/a/b?c=d": "blocked address",
        "sub.bad.com/x": "blocked address",
        "https://notbad.com/": None,
        "https://some.org/new": None,
        "https://some.org/newsletter": None,
        "https://some.org/news": "blocked address",
        "https://a.some.org/news/today": "blocked address",
        "https://x.org/My-Casino-1": "blocked word",
        "http://[broken": None,
    }.items():
        expected = None if why is None else f"url: {why}"
        assert reason(file, GOOD, tmp_path, url=address) == expected, address
    assert reason(file, GOOD, tmp_path) == "url: no address"


def test_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def judge(document):\n"
        "    text = document['text']\n"
        "    if text == 'url': return document['url'] == 'good'\n"
        "    if text == 'numpy': return np.bool_(False)\n"
        "    return {'no': False, 'why': 'a reason', 'other': {'text': 'new'}}.get(text, True)\n"
    )
    own = f"[own]\nfunction = '{tmp_path}/mine.py:judge'\nfields = ['url']\n"
    assert judge(own, "yes", tmp_path) == "yes"
    assert judge(own, "other", tmp_path) == "new"
    assert judge(own, "url", tmp_path, url="good") == "url"
    assert reason(own, "no", tmp_path) == "own: judge"
    assert reason(own, "numpy", tmp_path) == "own: judge"
    assert reason(own, "why", tmp_path) == "own: a reason"
    for function, message in {
        "gone.py:judge": "there is no file",
        "mine.py:absent": "there is no function 'absent'",
    }.items():
        with pytest.raises(UserError, match=message):
            judge(f"[own]\nfunction = '{tmp_path}/{function}'\n", "", tmp_path)
    with pytest.raises(UserError, match="No module named 'no_such_module'"):
        judge("[own]\nfunction = 'no_such_module:judge'\n", "", tmp_path)


# ------------------------------------------------------------------ settings


def test_names_and_values() -> None:
    names = [name for name, _ in parse_filters(["gopher,c4", "length=20"])]
    assert names == ["gopher-repetition", "gopher-quality", "c4", "length"]
    for given, message in {
        "gofer": r"there is no filter 'gofer'\n +did you mean gopher",
        "": "the name of a filter is empty",
        "c4,c4": "the filter c4 is given twice",
        "c4=5": "c4 takes no value",
        "length": "no bound is given",
        "length=many": r"--filter length=many: length.min_characters: .*integer",
        "url": "nothing is blocked",
        "language=Klingon": "'Klingon' is not known; there are English",
        "own=judge": "write file.py:function",
        "gone.toml": "cannot read the file of filters",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_filters([given])


def test_all_problems_of_a_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "filters.toml"
    file.write_text(
        "[gopher-quality]\nmin_word = 3\n[c4]\nmin_sentences = -1\n[gopher]\n[finewebb]\n"
        "[regex]\ndrop = ['(']\n[gopher-repetition]\ntop = {x = 0.5}\n"
    )
    with pytest.raises(UserError) as error:
        parse_filters([str(file)])
    text = str(error.value)
    for part in (
        "gopher-quality.min_word: there is no such setting",
        "did you mean min_words?",
        "c4.min_sentences: input should be greater than or equal to 0 (it is -1)",
        "gopher is a group of filters",
        "write [gopher-repetition] and [gopher-quality]",
        "there is no filter 'finewebb'",
        "'(' is no regular expression",
        "gopher-repetition.top.x",
    ):
        assert part in text
    for content, message in (("", "names no filter"), ("[c4", "not valid TOML")):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            parse_filters([str(file)])
    file.write_text("c4 = 1\n")
    with pytest.raises(UserError, match="must be a table"):
        parse_filters([str(file)])
