"""Errors about user code that a configuration names and that does not work."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_autosync.errors import DocumentError
from lightning_autosync.targets import find, make

FILES = {
    "plain_targets.py": "class There: pass\n",
    "nested_targets/__init__.py": "",
    "nested_targets/broken.py": "raise ValueError('no luck')\n",
    "broken_targets.py": "raise ValueError('no luck')\n",
}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("plain_targets.Nope", "module plain_targets has no 'Nope'"),
        ("plain_targets.Their", "module plain_targets has no 'Their'; did you mean 'There'\\?"),
        ("plain_targets.nope.Nope", "module plain_targets has no 'nope'"),
        ("plain_targets.There.Nope", "type object 'There' has no attribute 'Nope'"),
        ("nested_targets.Nope", "module nested_targets has no 'Nope'"),
        ("nested_targets.broken", "no luck"),
        ("nested_targets.broken.Nope", "no luck"),
        ("broken_targets.Nope", "no luck"),
        ("no_such_targets.Nope", "No module named 'no_such_targets'"),
    ],
)
def test_a_name_that_a_module_lacks_is_told(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("plain_targets", "nested_targets"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DocumentError, match=f"^model: '{re.escape(name)}' cannot be imported: .*{why}"):
        find("model", name)
    with pytest.raises(DocumentError, match=f"^model: '{re.escape(name)}': .*{why}"):
        make("model", {"_target_": name})
