"""Templates that loop, or write, without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.base.errors import DataError, UserError
from gristmill.text.chat import rendering
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.template import ChatTemplate, choose_template
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

HI = [Message("user", "Hi")]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a product": "{{ 'a' * 3000000000 }}",
    "a product of numbers": "{{ 9 ** 999999999 }}",
    "a format": "{{ '%0999999999d' % 1 }}",
    "a method": "{{ 'a'.zfill(9999999999) }}",
    "a filter": "{{ 'a' | center(9999999999) }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "much text": "{% for a in range(9999) %}{{ 'abcdefghij' * 9999 }}{% endfor %}",
}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.5)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="hostile: this template cannot be used: it "):
        ChatTemplate(ENDLESS[name], "hostile", {}).pieces(HI)
    # The next one is rendered as if nothing had happened.
    assert "".join(one.text for one in ChatTemplate(PLAIN, "x", {}).pieces(HI)) == "<user>Hi"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ (" * 5000, "{% if a %}" * 3000 + "{% endif %}" * 3000]
)
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="not a Jinja template"):
        ChatTemplate(source, "broken", {}).pieces(HI)


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    made = tmp_path / "made"
    source = "{{ cycler.__init__.__globals__.os.mkdir('" + str(made) + "') }}"
    with pytest.raises(Exception, match="unsafe"):
        ChatTemplate(source, "escaping", {}).pieces(HI)
    assert not made.exists()


def test_a_file_larger_than_any_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.jinja").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(UserError, match="larger than any template"):
        choose_template(str(tmp_path / "big.jinja"), ByteTokenizer(), folders=(), where="x")


def test_several_conversations_are_rendered_as_each_would_be() -> None:
    source = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not so') }}"
    source += "{% endif %}[{{ m.content | trim }}]{% endfor %}{{ bos_token }}"
    template = ChatTemplate(source, "x", {"bos_token": "<s>"})
    texts = ["a", " b", "no", "c ", ""]
    found = template.pieces_of([[Message("user", text)] for text in texts])
    assert [one if isinstance(one, Exception) else one[1].text for one in found][:2] == ["a", "b"]
    assert str(found[2]) == "not so" and isinstance(found[2], Exception)
    for text, one in zip(texts, found, strict=True):
        if text != "no":
            assert template.pieces([Message("user", text)]) == one


def test_the_other_process_ends_with_this_one() -> None:
    ChatTemplate(PLAIN, "x", {}).pieces(HI)
    assert rendering._RENDERER._process is not None
    other = rendering._RENDERER._process
    assert other.stdin is not None
    other.stdin.close()
    assert other.wait(timeout=60) == 0
    # It is started again when it is needed.
    rendering._RENDERER.close()
    assert ChatTemplate(PLAIN, "x", {}).pieces(HI)


def test_a_fork_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ChatTemplate(PLAIN, "x", {}).pieces(HI)
    first = rendering._RENDERER._process
    # As a fork sees it: another process started this one.
    monkeypatch.setattr(rendering._RENDERER, "_owner", 1)
    assert ChatTemplate(PLAIN, "x", {}).pieces(HI)
    assert rendering._RENDERER._process is not first
    assert first is not None and first.poll() is None
    first.kill()
    first.wait()
