"""Signatures of documents: against plain loops, and how often similar documents match."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from gristmill.base.hashing import mix
from gristmill.text.dedup.signatures import SignatureSettings, _multipliers, sign_texts
from gristmill.text.dedup.words import words_of

MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    return int(mix(np.array([value & MASK], np.uint64))[0])


def plain_keys(text: str, settings: SignatureSettings) -> list[int]:
    """The bucket keys of a text, number by number."""
    words = words_of([text]).hashes.tolist()
    length = min(settings.words, len(words))
    factors = [mixed((2 << 32) + place) | 1 for place in range(settings.words)]
    shingles = []
    for begin in range(len(words) - length + 1):
        total = 0 if len(words) >= settings.words else length
        for place in range(length):
            total += words[begin + place] * factors[place]
        shingles.append(mixed(total) >> 32)
    keys = []
    factors32 = _multipliers(settings.buckets * settings.hashes).tolist()
    for bucket in range(settings.buckets):
        key = 0
        for row in range(settings.hashes):
            factor = factors32[bucket * settings.hashes + row]
            key = mixed(key ^ min(shingle * factor % (1 << 32) for shingle in shingles))
        keys.append(mixed(key))
    return keys


def test_signatures_of_plain_loops() -> None:
    settings = SignatureSettings("minhash", words=3, buckets=4, hashes=2)
    chance = random.Random(1)
    texts = [" ".join(chance.choices("abcdefgh", k=size)) for size in (1, 2, 3, 4, 9, 40, 300, 2)]
    rows = sign_texts(texts, settings)
    assert rows[:, 2:].tolist() == [plain_keys(text, settings) for text in texts]
    digest = hashlib.blake2b(texts[4].encode(), digest_size=16).digest()
    assert rows[4, :2].tobytes() == digest
    alone = [sign_texts([text], settings)[0].tolist() for text in texts]
    assert rows.tolist() == alone, "a signature depends on the text alone"
    assert sign_texts([], settings).shape == (0, 6)


def test_long_texts_are_as_their_pieces_say() -> None:
    """More shingles than are computed at once."""
    settings = SignatureSettings("minhash", words=2, buckets=3, hashes=5)
    chance = random.Random(2)
    text = " ".join("".join(chance.choices("abcde", k=6)) for _ in range(25_000))
    other = "something else in front of it"
    assert sign_texts([other, text, other], settings)[1].tolist() == [
        *sign_texts([text], SignatureSettings())[0].tolist(),
        *plain_keys(text, settings),
    ]


def test_texts_without_words() -> None:
    settings = SignatureSettings("minhash")
    first, again, other = sign_texts(["!!!", "!!!", "???"], settings)
    assert first.tolist() == again.tolist()
    assert not set(first.tolist()) & set(other.tolist())


@pytest.mark.parametrize(("similarity", "expected"), [(0.7, 0.5653), (0.8, 0.9236), (0.9, 0.9996)])
def test_how_often_similar_documents_match(similarity: float, expected: float) -> None:
    """Pairs of documents that share a known part of their shingles, by whole sentences."""
    settings = SignatureSettings("minhash", words=1)
    chance = random.Random(similarity)

    def words(count: int) -> list[str]:
        return ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(count)]

    pairs, found = 500, 0
    size, shared = 200, round(200 * 2 * similarity / (1 + similarity))
    texts = []
    for _ in range(pairs):
        common = words(shared)
        texts += [" ".join(common + words(size - shared)) for _ in range(2)]
    keys = sign_texts(texts, settings)[:, 2:]
    found = int((keys[::2] == keys[1::2]).any(axis=1).sum())
    spread = (expected * (1 - expected) / pairs) ** 0.5
    assert abs(found / pairs - expected) < 3 * spread + 0.003
    assert not (keys[:-2:2] == keys[2::2]).any(), "strangers do not match"
