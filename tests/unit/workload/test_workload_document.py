"""The workload document: derived values, file form, and what it refuses."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sweeps import examples

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import Variable, Workload


def small(**changes: Any) -> Workload:
    variables = (
        Variable(name="table", shape=(10, 4), kind="row_sparse", ready=0.4, rows=2.5),
        Variable(name="weight", shape=(3, 4), dtype="bfloat16", ready=0.1),
        Variable(name="scale", shape=()),
        Variable(name="bias", shape=(3,), ready=0.1),
    )
    return Workload(**{"name": "small", "variables": variables, "backward_time": 0.4, **changes})


def test_sizes() -> None:
    workload = small()
    assert [variable.numel for variable in workload.variables] == [40, 12, 1, 3]
    assert [variable.bytes for variable in workload.variables] == [160, 24, 4, 12]
    assert workload.bytes == 200


def test_dtype_bytes_is_that_of_most_bytes() -> None:
    assert small().dtype_bytes == 4
    half = Variable(name="half", shape=(1000,), dtype="float16")
    assert small(variables=(*small().variables, half)).dtype_bytes == 2


def test_variable_by_name() -> None:
    workload = small()
    assert workload.variable("bias") is workload.variables[3]
    with pytest.raises(WorkloadError, match="workload 'small' has no variable 'nothing'"):
        workload.variable("nothing")


def test_a_copy_looks_up_its_own_variables() -> None:
    workload = small()
    workload.variable("bias")
    other = workload.model_copy(update={"variables": (Variable(name="other", shape=(2,)),)})
    assert other.variable("other").shape == (2,)
    with pytest.raises(WorkloadError, match="no variable 'bias'"):
        other.variable("bias")
    assert workload.variable("bias").shape == (3,)


def test_a_lookup_changes_neither_equality_nor_fingerprint() -> None:
    workload = small()
    fingerprint = workload.fingerprint
    workload.variable("bias")
    assert workload == small()
    assert workload.fingerprint == fingerprint


def test_ready_order_is_by_time_then_backwards_and_unknown_last() -> None:
    assert small().ready_order == ("bias", "weight", "table", "scale")


def test_ready_order_without_times_is_backwards() -> None:
    variables = tuple(Variable(name=name, shape=(1,)) for name in "abc")
    assert Workload(name="untimed", variables=variables).ready_order == ("c", "b", "a")


def test_variables_fingerprint_is_of_names_and_shapes_alone() -> None:
    workload = small()
    retyped = tuple(v.model_copy(update={"dtype": "float64", "ready": None}) for v in workload.variables)
    assert small(variables=retyped, name="else", backward_time=3).variables_fingerprint == (
        workload.variables_fingerprint
    )
    assert small(variables=workload.variables[::-1]).variables_fingerprint != workload.variables_fingerprint
    reshaped = (workload.variables[0].model_copy(update={"shape": (4, 10)}), *workload.variables[1:])
    assert small(variables=reshaped).variables_fingerprint != workload.variables_fingerprint


def test_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        small().backward_time = 1.0


NAMES = st.text(string.ascii_letters + string.digits + "._-é:# ", min_size=1, max_size=12)
SECONDS = st.floats(0, 1e4)


@st.composite
def variables_(draw: st.DrawFn, name: str, backward_time: float) -> Variable:
    shape = draw(st.lists(st.integers(0, 2**11), max_size=4))
    kind = draw(st.sampled_from(["dense", "sparse", "row_sparse"])) if shape else "dense"
    has_rows = kind != "dense" and draw(st.booleans())
    return Variable(
        name=name,
        shape=tuple(shape),
        dtype=draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"])),
        kind=kind,
        ready=draw(st.none() | st.floats(0, backward_time)),
        rows=draw(st.floats(0, shape[0])) if has_rows else None,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    backward_time = draw(SECONDS)
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    return Workload(
        name=draw(NAMES),
        variables=tuple(draw(variables_(name, backward_time)) for name in names),
        forward_time=draw(SECONDS),
        backward_time=backward_time,
        optimizer_time=draw(SECONDS),
    )


@examples(60)
@given(workload=workloads(), suffix=st.sampled_from([".yaml", ".json"]))
def test_save_and_load_give_the_same_workload(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("workload") / f"workload{suffix}"
    workload.save(path)
    loaded = Workload.load(path)
    assert loaded == workload
    assert loaded.fingerprint == workload.fingerprint
    assert sorted(loaded.ready_order) == sorted(variable.name for variable in workload.variables)


MALFORMED: dict[str, tuple[str, str]] = {
    "no format": ("{name: m, variables: [{name: a, shape: [1]}]}", "format: missing"),
    "foreign format": (
        "{format: autosync-plan/1, name: m, variables: [{name: a, shape: [1]}]}",
        "'autosync-plan/1' cannot be read; expected 'autosync-workload/1'",
    ),
    "newer format": (
        "{format: autosync-workload/2, name: m, variables: [{name: a, shape: [1]}]}",
        "written by a newer release",
    ),
    "not a mapping": ("[1, 2]", "expected a mapping"),
    "not YAML": ("{format: [", "not valid YAML"),
    "no variables field": ("{format: autosync-workload/1, name: m}", "variables: missing"),
    "no variable": ("{format: autosync-workload/1, name: m, variables: []}", "variables: .*at least 1 item"),
    "empty name": (
        "{format: autosync-workload/1, name: '', variables: [{name: a, shape: [1]}]}",
        "name: .*at least 1 character",
    ),
}

MALFORMED_VARIABLES: dict[str, tuple[str, str]] = {
    "duplicate": ("{name: a, shape: [1]}, {name: a, shape: [2]}", "variables: 'a' is named 2 times"),
    "negative size": ("{name: a, shape: [3, -1]}", r"variables\[0\].shape\[1\]: .*\(got -1\)"),
    "size true": ("{name: a, shape: [true]}", r"variables\[0\].shape\[0\]: .*integer"),
    "fractional size": ("{name: a, shape: [1.5]}", r"variables\[0\].shape\[0\]: .*integer"),
    "unknown dtype": ("{name: a, shape: [1], dtype: int8}", r"variables\[0\].dtype: 'int8' is not known; .*float32"),
    "unknown kind": ("{name: a, shape: [1], kind: odd}", r"variables\[0\].kind: 'odd' is not known; .*row_sparse"),
    "unknown field": ("{name: a, shape: [1], size: 3}", r"variables\[0\].size: unknown field"),
    "ready too late": (
        "{name: a, shape: [1], ready: 1.2}",
        "'a' is ready at 1.2 s, after the end of backward",
    ),
    "negative ready": ("{name: a, shape: [1], ready: -0.1}", r"variables\[0\].ready: .*-0.1"),
    "ready not a number": ("{name: a, shape: [1], ready: .nan}", r"variables\[0\].ready: .*finite"),
    "rows of a dense one": ("{name: a, shape: [9], rows: 2}", r"variables\[0\]: 'a' is dense; rows is for"),
    "too many rows": (
        "{name: a, shape: [9], kind: sparse, rows: 10}",
        r"'a' has 9 rows, of which 10.0 cannot",
    ),
    "sparse scalar": ("{name: a, shape: [], kind: row_sparse}", "'a' is a scalar"),
}
for case, (listed, message) in MALFORMED_VARIABLES.items():
    text = f"{{format: autosync-workload/1, name: m, backward_time: 1.0, variables: [{listed}]}}"
    MALFORMED[case] = (text, message)


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_document_is_refused_with_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=f"wrong.yaml: .*{message}|wrong.yaml: {message}"):
        Workload.load(path)


def test_a_ready_time_may_be_rounded_up() -> None:
    late = Variable(name="a", shape=(1,), ready=1.005)
    assert Workload(name="m", variables=(late,), backward_time=1.0).variables == (late,)


def test_a_missing_file_is_a_workload_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.yaml: cannot be read"):
        Workload.load(tmp_path / "nowhere.yaml")
