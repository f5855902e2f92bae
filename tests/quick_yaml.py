"""Hydra composes hundreds of configurations in tests; libyaml reads their files many times as fast as PyYAML does."""

from __future__ import annotations

from functools import cache
from typing import Any

import omegaconf._utils
import yaml

_python_loader = omegaconf._utils.get_yaml_loader


@cache
def _loader() -> Any:
    """OmegaConf's loader, on libyaml's parser."""
    made = _python_loader()
    if not yaml.__with_libyaml__ or issubclass(made, yaml.cyaml.CParser):
        return made

    class Loader(yaml.cyaml.CParser, made):
        def __init__(self, stream: Any) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


omegaconf._utils.get_yaml_loader = _loader
