"""The settings that determine the order of a run's samples, and whether they may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.checkpoint.state import TrainState, identity_changes
from gristmill.config.mixture import resolve_stages
from gristmill.config.resolve import Resolved
from gristmill.config.schema import DataConfig
from gristmill.data.build import OrderSpec, order_identity
from gristmill.data.dataset import Mixture
from gristmill.track.folder import RunFolder


def order_spec(data: DataConfig, resolved: Resolved, folder: RunFolder | None = None) -> OrderSpec:
    """The inputs of a run's sample order."""
    in_run = None if folder is None else folder.path / "index"
    return OrderSpec(
        sequence=resolved.sequence,
        seed=resolved.data_seed,
        samples=resolved.asked_samples,
        cache=Path(data.cache) if data.cache else in_run,
        end=resolved.samples,
        stages=resolve_stages(data, resolved),
    )


def order_problem(
    data: DataConfig, resolved: Resolved, train: Mixture, state: TrainState
) -> str | None:
    """Why a run cannot continue with changed settings of its order; None if it can."""
    try:
        now: dict[str, Any] = order_identity(data, train, order_spec(data, resolved))
    except UserError as error:
        return " ".join(str(error).split())
    saved = {name: state.identity[name] for name in now if name in state.identity}
    changes = identity_changes(saved, state, samples=state.progress.samples, now=now)
    if not changes:
        return None
    return "; ".join(f"{change.where}: {change.what}" for change in changes)
