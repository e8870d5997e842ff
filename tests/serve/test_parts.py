"""Parts of the server by themselves."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch

from gristmill.config.model import GPTConfig
from gristmill.generate.engine import Engine
from gristmill.generate.request import Request, TokenProbability
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_model
from gristmill.serve import prompt_scores
from gristmill.serve.choices import Choice
from gristmill.serve.metrics import Histogram, Metrics, ModelState
from gristmill.serve.prompt_scores import prompt_probabilities
from gristmill.serve.token_texts import Offsets, TokenTexts
from gristmill.serve.worker import News, Worker
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

TEXTS = TokenTexts(ByteTokenizer())
GREEDY = Sampling(temperature=0)


def make_model(context: int = 64) -> Any:
    config = GPTConfig(layers=2, heads=2, width=16, context=context, init_std=0.3, tie_head=False)
    model = build_model(config, vocab=257, device=torch.device("cpu"))
    model.initialise(0)
    return model


# ------------------------------------------------------------------ choices


def probabilities(text: bytes) -> list[TokenProbability]:
    return [TokenProbability(id, -1.0, ()) for id in text]


def make_choice(*stop: str, lead: str = "", echo: str = "") -> Choice:
    request = Request([1], 100, GREEDY, ends=frozenset({256}))
    return Choice(0, TEXTS, request, stop=stop, lead=lead, echo=echo)


def test_tokens_come_with_their_text() -> None:
    choice = make_choice("abc")
    written = []
    for byte in b"xab":
        choice.add(News([byte], probabilities(bytes([byte])), None))
        piece = choice.take()
        written.append((piece.text, [entry.id for entry in piece.entries]))
    # "ab" could become the stop string.
    assert written == [("x", [ord("x")]), ("", []), ("", [])]
    choice.add(News([ord("d")], probabilities(b"d"), "length"))
    piece = choice.take()
    assert piece.text == "abd" and [entry.id for entry in piece.entries] == [97, 98, 100]
    assert [entry.offset for entry in piece.entries] == [1, 2, 3]
    assert piece.finish == "length"


def test_what_is_behind_a_stop_string_is_nothing() -> None:
    choice = make_choice("abc")
    choice.add(News(list(b"xyabcdef"), probabilities(b"xyabcdef"), None))
    piece = choice.take()
    assert piece.text == "xy" and len(piece.entries) == 2 and piece.finish == "stop"
    assert choice.tokens == 5  # drawn until it was known


def test_what_is_left_of_a_stop_string_at_the_end_is_text() -> None:
    choice = make_choice("abc")
    choice.add(News([*b"xab", 256], [], "stop"))
    assert choice.take() == ("xab", [], "stop")


@pytest.mark.parametrize(
    ("written", "text"),
    [(b" hello", "hello"), (b"hello", "hello"), (b" ", ""), (b"", ""), (b"  a", " a")],
)
def test_what_a_template_puts_before_words_is_no_text(written: bytes, text: str) -> None:
    choice = make_choice(lead=" ")
    pieces = []
    for byte in written:
        choice.add(News([byte], probabilities(bytes([byte])), None))
        piece = choice.take()
        pieces.append(piece.text)
        assert not piece.text or piece.entries[-1].id == byte
    choice.add(News([256], [], "stop"))
    assert "".join([*pieces, choice.take().text]) == text


def test_offsets_count_characters() -> None:
    offsets = Offsets(TEXTS, start=2)
    found = [offsets.after(id) for id in "aé磨b".encode()]
    assert found == [2, 3, 3, 4, 4, 4, 5]
    broken = b"\xff\xffa"
    offsets = Offsets(TEXTS)
    assert [offsets.after(id) for id in broken] == [0, 1, 2]


# ------------------------------------------------------------------ the worker


def run(test: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(90):
            return await test()

    return asyncio.run(main())


def test_a_slow_event_loop_holds_the_engine_back() -> None:
    """What was drawn and not delivered stays little."""
    model = make_model()

    async def test() -> int:
        worker = Worker(lambda: Engine(model, slots=1), log=print)
        ended = asyncio.Event()
        got: list[int] = []

        def deliver(news: News) -> None:
            got.extend(news.ids)
            if news.finish:
                ended.set()

        worker.submit(Request([1], 60, GREEDY), deliver)
        generation: Any = None
        full = threading.Event()
        undelivered = worker._undelivered

        class Watched:
            def acquire(self, timeout: float) -> bool:
                taken = undelivered.acquire(blocking=False)
                if not taken:
                    full.set()
                    return undelivered.acquire(timeout=timeout)
                return True

            def release(self) -> None:
                undelivered.release()

        worker._undelivered = Watched()  # type: ignore[assignment]
        assert full.wait(90)  # the event loop does nothing meanwhile
        (generation,) = worker._tickets
        behind = len(generation.ids)
        await ended.wait()
        assert len(got) == 60
        worker.close()
        return behind

    assert run(test) <= 10


def test_a_cancelled_request_says_nothing_more() -> None:
    model = make_model()

    async def test() -> None:
        worker = Worker(lambda: Engine(model, slots=1), log=print)
        got, other = list[News](), asyncio.Event()
        ticket = worker.submit(Request([1], 60, GREEDY), got.append)
        worker.cancel(ticket)
        assert worker.pending == 0
        worker.submit(Request([1], 2, GREEDY), lambda news: other.set() if news.finish else None)
        await other.wait()
        assert got == []
        worker.cancel(ticket)
        assert worker.pending == 0
        worker.close()

    run(test)


def test_jobs_and_requests_take_turns() -> None:
    model = make_model()

    async def test() -> None:
        worker = Worker(lambda: Engine(model, slots=1), log=print)
        done = asyncio.Event()
        worker.submit(Request([1], 30, GREEDY), lambda news: done.set() if news.finish else None)

        def endless() -> Any:
            while True:
                yield 1

        job = asyncio.ensure_future(worker.compute(endless()))
        await done.wait()  # though the job never ends
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert await worker.compute(iter("abc")) == ["a", "b", "c"]

        def broken() -> Any:
            yield 1
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await worker.compute(broken())
        assert worker.pending == 0
        worker.close()
        await asyncio.to_thread(worker.join, 90)

    run(test)


# ------------------------------------------------------------------ scores


def test_scores_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(), [5, 9, 200, 7, 7, 31, 256, 1, 90, 17]
    whole = list(prompt_probabilities(model, ids, likeliest=2, known=257, dtype=torch.float32))
    assert len(whole) == 1
    monkeypatch.setattr(prompt_scores, "LOGIT_BYTES", 4 * 257 * 4)
    chunks = list(prompt_probabilities(model, ids, likeliest=2, known=257, dtype=torch.float32))
    assert [len(chunk) for chunk in chunks] == [4, 4, 1]
    with torch.inference_mode():
        exact = model(torch.tensor([ids]))[0].log_softmax(1)
    for place, (one, other) in enumerate(zip(whole[0], itertools.chain(*chunks), strict=True)):
        assert one.id == other.id == ids[place + 1]
        assert one.log_prob == pytest.approx(float(exact[place, ids[place + 1]]), abs=1e-5)
        assert other.log_prob == pytest.approx(one.log_prob, abs=1e-5)
        assert [id for id, _ in one.likeliest] == exact[place].topk(2).indices.tolist()
    nothing = prompt_probabilities(model, [5], likeliest=0, known=257, dtype=torch.float32)
    assert list(nothing) == []


def test_ids_that_cannot_be_drawn_are_impossible() -> None:
    scores = prompt_probabilities(
        make_model(), [5, 250, 6], likeliest=300, known=100, dtype=torch.float32
    )
    first, second = next(scores)
    assert first.log_prob == -torch.inf and second.log_prob > -100
    assert len(first.likeliest) == 100


# ------------------------------------------------------------------ metrics


def test_histograms_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7):
        histogram.add(value)
    histogram.add(0.5, times=2)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="0.1"} 2',
        'x_bucket{le="1.0"} 5',
        'x_bucket{le="+Inf"} 6',
        "x_sum 8.650000",
        "x_count 6",
    ]


def test_metrics_have_one_head_for_each_name() -> None:
    metrics = Metrics()
    requests = {("/v1/completions", 200): 2}
    models = [ModelState("a", 4, 1, 0), ModelState('b"\n', 4, 2, 3)]
    lines = metrics.text(models, requests=requests, running=3).splitlines()
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert 'gristmill_queue{model="b\\"\\n"} 3' in lines
    assert 'gristmill_requests_total{route="/v1/completions",status="200"} 2' in lines
