"""What tells one config from another."""

from __future__ import annotations

import hashlib
import re
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def digest_of(config: Any) -> str:
    """Sixteen hexadecimal digits that stand for a config of OmegaConf; interpolations count as they are written."""
    from omegaconf import OmegaConf

    try:
        text = OmegaConf.to_yaml(config, resolve=False, sort_keys=True)
    except Exception:  # an object that YAML cannot tell; its address is another one in another process
        text = _ADDRESS.sub("", repr(OmegaConf.to_container(config, resolve=False)))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
