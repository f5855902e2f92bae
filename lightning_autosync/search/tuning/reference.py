"""A study keeps which plan is the reference of all its sessions and processes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import optuna

from lightning_autosync.documents import parse_json
from lightning_autosync.measure.reference import ReferencePlan
from lightning_autosync.plan import SyncPlan
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.tuning.interruptions import uninterrupted

REFERENCE = "autosync:reference-plan"
"""User attribute of a study: the reference plan, as JSON text. There is one for all sessions and processes, since
times relative to one plan cannot be compared with times relative to another."""


def settle_reference(reference: ReferencePlan, study: optuna.Study, plans: Sequence[SyncPlan]) -> None:
    """Take the study's reference plan; if it has none, the first of ``plans`` that runs, which the study then keeps.

    Raises:
        LaunchError: workers cannot be started.
        StorageError: the study's storage does not answer.
    """
    if (kept := _kept(study)) is not None:
        reference.take(kept)
        return
    plan = reference.take_first_that_runs(plans)
    if plan is not None and (chosen := _keep(study, plan)).fingerprint != plan.fingerprint:
        reference.take(chosen)


@uninterrupted()
@storage_errors()
def _kept(study: optuna.Study) -> SyncPlan | None:
    found, where = study.user_attrs.get(REFERENCE), f"study '{study.study_name}': {REFERENCE}"
    return None if found is None else SyncPlan.from_dict(parse_json(found, where, StudyError), where)


@uninterrupted()
@storage_errors()
def _keep(study: optuna.Study, plan: SyncPlan) -> SyncPlan:
    """The plan, or that of another process that chose one in the meantime."""
    if (kept := _kept(study)) is not None:
        return kept
    study.set_user_attr(REFERENCE, json.dumps(plan.to_dict()))
    return _kept(study) or plan
