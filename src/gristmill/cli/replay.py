"""`replay`: compute a step again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.cli.options import Overrides

if TYPE_CHECKING:
    from gristmill.train.replay import Replay

_ROWS = 5
"""How many steps are printed."""


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, or the run file.")],
    step: Annotated[int, typer.Argument(min=1, metavar="STEP", help="The step to compute again.")],
    settings: Overrides = None,
) -> None:
    """Compute a step of a run again, to tell a faulty device from a bad batch.

    All steps from the last checkpoint before it are computed twice, and compared with each other
    and with the run's records. Nothing in the run folder changes.
    """
    from gristmill.base.downloads import settings_folder
    from gristmill.cli.progress import ProgressLine
    from gristmill.config.load import load_run
    from gristmill.train.replay import replay_step

    config = load_run(run, settings or (), find_model=settings_folder)
    with ProgressLine("replaying") as line:
        found = replay_step(
            config,
            step,
            progress=lambda number, done, start: line.update(
                (number - 1) * (step - start) + done - start,
                2 * (step - start),
                f"round {number}, step {done}",
            ),
        )
    _print(found)
    if not found.repeats:
        raise UserError(
            "two computations of the same steps differ: this device or its memory is faulty",
            where=f"steps {found.start + 1} to {step}",
            remedy="test the machine, and go back to a checkpoint from before the trouble",
            exit=Exit.DEVICE,
        )


def _print(found: Replay) -> None:
    typer.echo(f"steps {found.start + 1} to {found.step}, computed twice from step {found.start}\n")
    typer.echo(f"{'step':>8}  {'loss':>11}  {'again':>11}  {'recorded':>11}  {'grad norm':>10}")
    for number in list(found.first)[-_ROWS:]:
        recorded = found.recorded.get(number)
        then = "-" if recorded is None else f"{recorded.loss:.6f}"
        first, second = found.first[number], found.second[number]
        losses = f"{first.loss:>11.6f}  {second.loss:>11.6f}  {then:>11}"
        typer.echo(f"{number:>8}  {losses}  {first.norm:>10.4g}")
    typer.echo()
    for line in found.changed:
        typer.echo(f"changed since the run: {line}")
    for line in found.differences:
        typer.echo(line)
    if found.repeats and found.departs_at is not None:
        typer.echo(
            "Both computations agree to the bit, but the run recorded something else at step "
            f"{found.departs_at}.\nIts device had a fault then that has passed, or code, data or "
            "settings have changed."
        )
    elif found.repeats and found.step not in found.first:
        typer.echo(
            f"The run passed over the samples of step {found.step} after a rollback, and so did "
            "both\ncomputations: there is nothing to compare."
        )
    elif found.repeats and found.step in found.recorded:
        how = "within rounding" if found.differences else "to the bit"
        typer.echo(
            f"Both computations agree to the bit, and the records agree with them {how}.\n"
            "The device is not to blame: look at the batch and the settings."
        )
    elif found.repeats:
        known = sum(step in found.recorded for step in found.first)
        others = f"; the {known} steps before it that have one agree" if known else ""
        typer.echo(
            f"Both computations agree to the bit. The run has no record of step {found.step} to "
            f"compare with{others}."
        )
    typer.echo(f"\nSamples of step {found.step} with the highest loss, before its update:")
    for one in found.worst:
        typer.echo(f"{one.sample:>12}  loss {one.loss:.4f}  {one.text!r}")
