"""Deduplication of a preparation in parts: all parts are signed, then grouped once, then encoded.

    prepare … --parts 8 --part 3        signs part 3, as long as it is not grouped as it is now
    prepare … --parts 8 --dedup-group   groups all of them, when they are signed
    prepare … --parts 8 --part 3        encodes what stays of part 3

`--engine` does all of it. Grouping is a command of its own where others run the parts, so that it
happens once and at a time that is known; tasks that looked for the last of them to sign might all
think that another one is it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import usable_cores
from gristmill.text.prepare.deduplicate import PartDrops, group_parts, load_signed
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.prepare.signing import Listener, SignedPart, signing_request
from gristmill.text.prepare.work_plan import WorkPlan
from gristmill.text.prepare.workers import Workers
from gristmill.text.sources.reading import find_sources
from gristmill.text.tokenizers.tokenizer import Tokenizer

_MOST_NAMED = 5


def signed_part(part: PrepareRequest, plan: WorkPlan, tokenizer: Tokenizer) -> SignedPart | None:
    """The records of a part, if it is signed as the same command would sign it now."""
    signed = load_signed(part, part.part)
    asked = signing_request(part.as_json(tokenizer), part)
    return signed if signed and signed.holds(asked, plan.signed_ids) else None


def group_and_drop(
    requests: Sequence[PrepareRequest],
    plans: Sequence[WorkPlan],
    tokenizer: Tokenizer,
    *,
    listener: Listener,
    note: Callable[[str], None],
) -> None:
    """Group all parts, which are signed, and let the plans know what is dropped."""
    signed = [signed_part(*facts, tokenizer) for facts in zip(requests, plans, strict=True)]
    missing = [
        str(request.part) for request, part in zip(requests, signed, strict=True) if not part
    ]
    if missing:
        names = ", ".join(missing[:_MOST_NAMED]) + (", …" if len(missing) > _MOST_NAMED else "")
        raise UserError(
            f"{len(missing)} of {len(requests)} parts are not signed as their sources are now: "
            f"{names}",
            where="--dedup-group",
            remedy="run these parts first, with the same command and --part",
            exit=Exit.REFUSED,
        )
    parts = [part for part in signed if part]
    dedup = requests[0].dedup
    assert dedup is not None
    with ExitStack() as stack:
        workers = None
        if dedup.against:
            workers = Workers(requests[0].workers or usable_cores())
            stack.callback(workers.close)
        group_parts(requests[0], parts, workers, listener=listener, note=note)
    for plan, part in zip(plans, parts, strict=True):
        plan.drop(PartDrops(part, dedup.settings))


def group_signed_parts(
    requests: Sequence[PrepareRequest], *, listener: Listener, note: Callable[[str], None]
) -> None:
    """Group all parts of a preparation, which job arrays or other programs have signed."""
    request = requests[0]
    sources = find_sources(request.sources, request.options).sources
    plans = [WorkPlan(sources, part) for part in requests]
    tokenizer = request.tokenizer() if callable(request.tokenizer) else request.tokenizer
    group_and_drop(requests, plans, tokenizer, listener=listener, note=note)
    note(f"{len(requests):,} parts are grouped; now run each of them again")
