"""JSON of unknown origin: whatever is wrong with it ends in a ValueError."""

import json
from pathlib import Path
from typing import Any


def parse(text: str | bytes) -> Any:
    """Returns what JSON text says.

    Raises:
      ValueError: it is malformed, not UTF-8, or nested beyond reason.
    """
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises:
      ValueError: the file is malformed or holds something else.
      OSError: it cannot be read.
    """
    try:
        found = parse(path.read_bytes())
    except ValueError as err:
        raise ValueError(f"{path} is not whole JSON ({err}); fetch it again") from err
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a JSON object")
    return found
