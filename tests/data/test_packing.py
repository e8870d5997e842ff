"""Packed conversations: each in one sample, none leaks into another, none is counted wrongly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.config.model import GPTConfig
from gristmill.config.schema import DataConfig
from gristmill.data import conversations
from gristmill.data.build import OrderSpec, build_stream
from gristmill.data.conversations import ChatOptions, open_conversations
from gristmill.data.dataset import RunData
from gristmill.data.loader import Batch, DocumentRules, Loader, make_batch, validation_batches
from gristmill.data.sampling import PackedShuffled, pack
from gristmill.models.build import build_model
from gristmill.models.loss_terms import LossTerms
from gristmill.models.spec import CausalLM, Loss
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.chat.template import ChatTemplate, choose_template
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CHAT = ChatEncoder(
    BYTES, choose_template("plain", BYTES, folders=(), where="data.template"), where="data.template"
)
RULES = DocumentRules(doc_starts="files", attention=True, positions=True)
SEQUENCE = 96


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    length=st.integers(2, 32),
    together=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_conversation_is_in_one_sample_of_each_epoch(
    lengths: list[int], length: int, together: bool, seed: int
) -> None:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    loss_mask = np.random.default_rng(seed).random(starts[-1]) < 0.3
    padding = int(starts[-1])
    packing, counts = pack(starts, loss_mask, length=length, padding=padding, together=together)
    expected = {
        int(begin)
        for begin, end in pairwise(starts)
        if loss_mask[begin : min(end, begin + length)].any()
    }
    assert counts.dropped == len(lengths) - len(expected)
    if not expected:
        assert len(packing) == 0
        return
    index = PackedShuffled(packing, seed)
    for epoch in (0, 3):
        numbers = np.arange(epoch * index.epoch, (epoch + 1) * index.epoch)
        spans = index.spans(numbers)
        assert spans.counts.sum() == length * index.epoch
        real = spans.begins != padding
        assert sorted(spans.begins[real].tolist()) == sorted(expected)
        # A span keeps all that is learnt of the conversation's first part, and ends with it.
        for begin, count in zip(spans.begins[real], spans.counts[real], strict=True):
            end = int(starts[np.searchsorted(starts, begin, side="right")])
            assert loss_mask[begin + count - 1]
            assert not loss_mask[begin + count : min(end, begin + length)].any()
    orders = [index.spans(np.arange(e * len(packing), (e + 1) * len(packing))) for e in (0, 0)]
    assert np.array_equal(orders[0].begins, orders[1].begins)
    if together:
        # No two samples could be one: best fit never leaves that.
        rooms = [
            int(c) for b, c in zip(packing.begins, packing.counts, strict=True) if b == padding
        ]
        assert sum(2 * room >= length for room in rooms) <= 1


def write(folder: Path, count: int = 40) -> tuple[Path, list[list[Message]]]:
    rng, talks = np.random.default_rng(4), []
    for number in range(count):
        turns = int(rng.integers(1, 3))
        talks.append(
            [
                Message(role, f"{role[0]}{number} " * int(rng.integers(1, 4)) + "!")
                for _ in range(turns)
                for role in ("user", "assistant")
            ]
        )
    lines = ([{"role": one.role, "content": one.content} for one in talk] for talk in talks)
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file, talks


def open_chat(file: Path, split: str = "1,0", *, together: bool = True) -> RunData:
    config = DataConfig(kind="chat", paths=str(file), split=split)
    return open_conversations(config, CHAT, ChatOptions(SEQUENCE, together=together))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.manual_seed(0)
    config = GPTConfig(layers=2, heads=2, width=16, context=SEQUENCE)
    model = build_model(config, vocab=257, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that what a token sees matters.
            parameter.normal_(std=0.5)
    return model


def loss_of(model: CausalLM, batch: Batch) -> float:
    with torch.no_grad():
        loss = model(
            batch.tokens_BT,
            targets_BT=batch.targets_BT,
            terms=LossTerms(batch.loss_weights_BT),
            positions_BT=batch.positions_BT,
            documents_BT=batch.documents_BT,
        )
    assert isinstance(loss, Loss)
    return float(loss.total)


@pytest.mark.parametrize("together", [True, False])
def test_packed_conversations_have_the_loss_of_each_alone(
    tmp_path: Path, model: CausalLM, together: bool
) -> None:
    file, talks = write(tmp_path)
    alone, loss_tokens = 0.0, 0.0
    for talk in talks:
        encoded = CHAT.encode(talk)
        assert len(encoded.ids) <= SEQUENCE + 1
        batch = make_batch(encoded.ids[None], loss_mask_BS=encoded.loss_mask[None])
        alone += loss_of(model, batch)
        loss_tokens += batch.loss_tokens
    data = open_chat(file, together=together)
    rules = RULES if together else DocumentRules()
    batches = list(
        validation_batches(data.train, sequence=SEQUENCE, windows=999, batch=3, rules=rules)
    )
    assert (sum(batch.samples for batch in batches) < len(talks)) == together
    assert sum(batch.loss_tokens for batch in batches) == loss_tokens
    packed = sum(loss_of(model, batch) for batch in batches)
    assert packed == pytest.approx(alone, rel=1e-5)
    if together:
        joined = validation_batches(data.train, sequence=SEQUENCE, windows=999, batch=3)
        assert sum(loss_of(model, batch) for batch in joined) != pytest.approx(alone, rel=1e-4)


def test_the_loader_gives_every_answer_once_in_an_epoch_whatever_the_ranks(tmp_path: Path) -> None:
    file, talks = write(tmp_path)
    data = open_chat(file)
    spec = OrderSpec(sequence=SEQUENCE, seed=5, samples=0, cache=None)
    stream = build_stream(DataConfig(kind="chat", paths=str(file)), data.train, spec)
    samples = len(data.train.splits[0].packing or ())
    expected = sorted(
        BYTES.decode(one.ids[one.loss_mask].tolist()) for one in map(CHAT.encode, talks)
    )

    def answers(first: int, count: int, ranks: int) -> list[str]:
        found = list[str]()
        for rank in range(ranks):
            loader = Loader(stream, 1, count // ranks, rules=RULES, rank=rank, ranks=ranks)
            for batch in loader.step_batches(first):
                assert batch.loss_weights_BT is not None and batch.documents_BT is not None
                kept = batch.loss_weights_BT[0] > 0
                assert batch.loss_tokens == int(kept.sum())
                for document in batch.documents_BT[0].unique():
                    here = kept & (batch.documents_BT[0] == document)
                    if here.any():
                        found.append(BYTES.decode(batch.targets_BT[0][here].tolist()))
        return sorted(found)

    even = samples - samples % 2
    assert answers(0, samples, 1) == expected
    assert answers(samples, samples, 1) == expected
    assert answers(0, even, 2) == answers(0, even, 1)


def test_splits_are_cut_between_conversations(tmp_path: Path) -> None:
    file, talks = write(tmp_path)
    data = open_chat(file, "75,20,5")
    assert data.validation is not None
    held = [split.tokens for split in data.validation.splits]
    trained = [split.tokens for split in data.train.splits]
    starts = np.cumsum([0, *(len(CHAT.encode(talk).ids) for talk in talks)])
    assert trained == [range(starts[30])]
    assert held == [range(starts[30], starts[38])]
    assert data.notes[0] == "conversations become text by the template plain"
    assert "30 conversations" in data.notes[1] and "8 conversations" in data.notes[2]


def test_long_conversations_are_cut_and_counted(tmp_path: Path) -> None:
    talks = [
        [("user", "q" * 10), ("assistant", "a" * 200)],
        [("user", "q" * 200), ("assistant", "a")],
        [("user", "q"), ("assistant", "a")],
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text(
        "".join(
            json.dumps([{"from": role, "value": text} for role, text in talk]) + "\n"
            for talk in talks
        )
    )
    data = open_chat(file)
    assert data.warnings == (
        "training: 1 of 3 conversations are longer than 96 tokens and are cut",
        "training: 1 of 3 conversations have no answer in their first 96 tokens and are left out",
    )
    batches = list(
        validation_batches(data.train, sequence=SEQUENCE, windows=9, batch=1, rules=RULES)
    )
    assert len(batches) == 2
    kept = [
        int((batch.targets_BT == ord("a")).logical_and(batch.loss_weights_BT > 0).sum())
        for batch in batches
    ]
    assert sorted(kept) == [1, SEQUENCE + 1 - len("User:\nqqqqqqqqqq\n\nAssistant:\n")]
    (tmp_path / "chat.jsonl").write_text(file.read_text().splitlines()[1] + "\n")
    with pytest.raises(UserError, match="has an answer in its first 97 tokens"):
        open_chat(file)


def test_what_the_template_does_not_accept(tmp_path: Path) -> None:
    file, _ = write(tmp_path, 3)
    loud = [{"role": "user", "content": "NO!"}, {"role": "assistant", "content": "Yes"}]
    file.write_text(file.read_text() + json.dumps(loud) + "\n")

    def opened(condition: str, then: str) -> RunData:
        source = CHAT.template.source
        source = "{% if messages[0]['content'] " + condition + " %}" + then + "{% endif %}" + source
        template = ChatTemplate(source, "picky", BYTES.named_tokens)
        chat = ChatEncoder(BYTES, template, where="data.template")
        config = DataConfig(kind="chat", paths=str(file), split="1,0")
        return open_conversations(config, chat, ChatOptions(SEQUENCE, together=True))

    found = opened("is upper", "{{ raise_exception('too loud') }}")
    assert found.warnings == (
        f"{file}: 1 of 4 lines are left out: 1 refused by the template, at {file}:4 (too loud)",
    )
    # What only begins the plain text, and not that with marks, cannot be told apart.
    with pytest.raises(UserError, match="rewrites the messages") as caught:
        opened(".startswith('NO')", "{{ 1 }}")
    assert str(caught.value).startswith(f"{file}:4: ")


def test_large_sets_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write(tmp_path)
    monkeypatch.setattr(conversations, "WORTH_CACHING", 1)
    config = DataConfig(kind="chat", paths=str(file), split="1,0")
    options = ChatOptions(SEQUENCE, together=True, cache=tmp_path / "index")
    first = open_conversations(config, CHAT, options).train.splits[0].source
    monkeypatch.setattr(conversations, "_encode", None)
    again = open_conversations(config, CHAT, options).train.splits[0].source
    assert again.ids is not None and again.loss_mask is not None
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.loss_mask, again.loss_mask)
    assert first.reader.info == again.reader.info
