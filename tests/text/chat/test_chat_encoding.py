"""Templates: what is whose, what becomes a control token, and what is learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder, turn_ends
from gristmill.text.chat.template import (
    ChatTemplate,
    TemplateRefusedError,
    TemplateRewritesError,
    choose_template,
    find_template,
)
from gristmill.text.tokenizers.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

BYTES = ByteTokenizer()
TALK = [
    Message("system", "Be kind."),
    Message("user", "Hi"),
    Message("assistant", "Yo"),
    Message("user", "More"),
    Message("assistant", "No"),
]
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content']"
    " | trim + ' [/INST]' }}{% elif m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'].split('</think>')[-1] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def encoder(tokenizer: Tokenizer, template: str = "auto") -> ChatEncoder:
    found = choose_template(template, tokenizer, folders=(), where="data.template")
    return ChatEncoder(tokenizer, found, where="data.template")


def written(tokenizer: Tokenizer, source: str) -> ChatEncoder:
    template = ChatTemplate(source, "test", tokenizer.named_tokens)
    return ChatEncoder(tokenizer, template, where="data.template")


def loss_mask(chat: ChatEncoder, messages: list[Message]) -> list[str]:
    """The texts that count, run by run."""
    return [run.text for run in chat.runs(messages) if run.loss_mask]


def test_plain_needs_no_control_token_but_the_end() -> None:
    chat = encoder(BYTES)
    encoded = chat.encode(TALK)
    end = "<|endoftext|>"
    assert BYTES.decode(encoded.ids.tolist()) == (
        "System:\nBe kind.\n\nUser:\nHi\n\nAssistant:\nYo" + end
        + "\n\nUser:\nMore\n\nAssistant:\nNo" + end + "\n\n"
    )  # fmt: skip
    assert BYTES.decode(encoded.ids[encoded.loss_mask].tolist()) == f"Yo{end}No{end}"
    assert chat.ends == {256}


def test_the_begin_of_text_that_files_state_is_kept(chatml: Tokenizer, tmp_path: Path) -> None:
    assert chatml.named_tokens["bos_token"] == "<s>"
    chatml.save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert again.named_tokens == chatml.named_tokens
    assert again.fingerprint == chatml.fingerprint


def test_chatml_ends_turns_with_its_own_token(chatml: Tokenizer) -> None:
    chat = encoder(chatml)
    assert chat.template.name == "chatml"
    assert loss_mask(chat, TALK) == ["Yo", "<|im_end|>", "No", "<|im_end|>"]
    assert chat.ends == {chatml.control_tokens["<|im_end|>"], chatml.end_of_text}


def test_a_prompt_is_where_the_answer_begins(chatml: Tokenizer) -> None:
    for chat in (encoder(BYTES), encoder(chatml), written(chatml, LLAMA_2)):
        messages = TALK[1:] if "INST" in chat.template.source else TALK
        ids = chat.encode(messages).ids.tolist()
        prompt = chat.encode_prompt(messages[:-1])
        assert ids[: len(prompt)] == prompt
        # What is left is exactly the last answer, up to what follows its end.
        rest = chat.encode(messages)
        assert rest.loss_mask[len(prompt) :].tolist()[:2] == [True, True]
        assert not rest.loss_mask[len(prompt) - 1]


def test_a_template_may_put_blanks_around_answers(chatml: Tokenizer) -> None:
    chat = written(chatml, LLAMA_2)
    # The prompt ends before the space, so a model has to write it.
    assert loss_mask(chat, TALK[1:]) == [" Yo ", "<|endoftext|>", " No ", "<|endoftext|>"]
    assert loss_mask(chat, [Message("user", " a "), Message("assistant", "\n b ")])[0] == " b "
    with pytest.raises(TemplateRefusedError, match="no system role"):
        chat.runs(TALK)


def test_what_comes_between_prompt_and_words_is_written_by_the_model(chatml: Tokenizer) -> None:
    source = (
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
        "{{ '<s>' if m['role'] == 'assistant' else '' }}{{ m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    chat = written(chatml, source)
    assert loss_mask(chat, TALK) == ["<s>", "Yo", "<|im_end|>", "<s>", "No", "<|im_end|>"]
    assert chat.ends == {chatml.control_tokens["<|im_end|>"], chatml.end_of_text}
    assert chat.runs(TALK)[0].text == "26 July 2024"


def test_a_prompt_that_training_does_not_see_is_noticed(chatml: Tokenizer) -> None:
    assert written(chatml, THINKING).prompts_alike
    forced = THINKING.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>")
    chat = written(chatml, forced)
    assert not chat.prompts_alike
    assert loss_mask(chat, TALK)[0] == "Yo"


WORDS = st.sampled_from(
    ["<|im_end|>", "<|endoftext|>", "<s>", "<|im_", "end|>", " ", "\n", "a", "\U000f0000",
     "\U00100001", "{{ eos_token }}", "é"]
)  # fmt: skip
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map("".join)


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), trims=st.booleans())
def test_no_message_can_write_a_control_token(
    chatml: Tokenizer, texts: list[str], trims: bool
) -> None:
    chat = written(chatml, LLAMA_2) if trims else encoder(chatml)
    messages = [
        message for text in texts for message in (Message("user", text), Message("assistant", text))
    ]
    text = "".join(texts)
    if "\U000f0000" in text and "\U00100001" in text:
        with pytest.raises(TemplateRefusedError, match="private use"):
            chat.runs(messages)
        return
    harmless = [Message(message.role, "a") for message in messages]
    control = set(chatml.control_tokens.values())
    found, expected = (
        [id for id in chat.encode(one).ids.tolist() if id in control]
        for one in (messages, harmless)
    )
    assert found == expected


@settings(deadline=None)
@given(
    texts=st.lists(
        # One plane for private use is left to the sentinels.
        st.text(st.characters(codec="utf-8", max_codepoint=0xFFFFF), min_size=1, max_size=9),
        min_size=1,
        max_size=3,
    )
)
def test_pieces_are_the_rendered_text(chatml: Tokenizer, texts: list[str]) -> None:
    chat = encoder(chatml)
    messages = [Message(role, text) for text in texts for role in ("user", "assistant")]
    pieces = chat.template.pieces(messages)
    assert [piece.text for piece in pieces if piece.message is not None] == [
        message.content for message in messages
    ]


def test_a_template_that_rewrites_messages_is_refused(chatml: Tokenizer) -> None:
    chat = written(chatml, THINKING)
    assert loss_mask(chat, TALK)[0] == "Yo"
    with pytest.raises(TemplateRewritesError):
        chat.runs([Message("user", "Hi"), Message("assistant", "<think>hm</think>Yo")])
    cut = THINKING.replace("m['content'].split('</think>')[-1]", "m['content'][:3]")
    with pytest.raises(UserError, match="rewrites messages"):
        written(chatml, cut)


def test_unusable_templates_are_named(tmp_path: Path, chatml: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"no control token <\|im_start\|> or <\|im_end\|>"):
        encoder(BYTES, "chatml")
    with pytest.raises(UserError, match="cannot read the template"):
        encoder(BYTES, str(tmp_path / "missing.jinja"))
    with pytest.raises(UserError, match="not a Jinja template"):
        written(BYTES, "{% for %}")
    endless = "{% for m in messages %}{{ m['role'] + m['content'] + '\\n' }}{% endfor %}"
    with pytest.raises(UserError, match="could not learn where to stop"):
        written(BYTES, endless)
    assert turn_ends(BYTES, ChatTemplate(endless, "test", {})) == frozenset()
    with pytest.raises(UserError, match="does not render a question"):
        written(BYTES, "{{ raise_exception('never') }}")
    # The sandbox: a template cannot reach the program.
    with pytest.raises(UserError, match="does not render a question"):
        written(BYTES, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert find_template(tmp_path, BYTES) is None
    settings = tmp_path / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]
    for stated in ("A", several):
        settings.write_text(json.dumps({"chat_template": stated}))
        found = find_template(tmp_path, BYTES)
        assert found is not None and found.source == "A"
    ChatTemplate("C", "x", {}).save(tmp_path)
    found = choose_template("auto", BYTES, folders=[tmp_path], where="data.template")
    assert found.source == "C"


def test_transformers_gives_the_same_ids(chatml_folder: Path, chatml: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chatml_folder)
    marked = THINKING.replace("{{ m['content']", "{% generation %}{{ m['content']")
    marked = marked.replace("+ '<|im_end|>' + '\\n' }}", "+ '<|im_end|>' }}{% endgeneration %}\n")
    for chat in (
        encoder(chatml),
        encoder(chatml, "plain"),
        written(chatml, LLAMA_2),
        written(chatml, marked),
    ):
        messages = TALK[1:] if "INST" in chat.template.source else TALK
        as_dicts = [{"role": one.role, "content": one.content} for one in messages]
        theirs.chat_template = chat.template.source
        ids = theirs.apply_chat_template(as_dicts, return_dict=False)
        assert chat.encode(messages).ids.tolist() == ids
        prompt = theirs.apply_chat_template(
            as_dicts[:-1], add_generation_prompt=True, return_dict=False
        )
        assert chat.encode_prompt(messages[:-1]) == prompt
