# SPDX-License-Identifier: Apache-2.0
"""Sets of steps, ranks or layers as people write them: "1,3-7"."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from rl_insight_hooks.errors import ConfigError

_PART = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


@dataclass(frozen=True, slots=True)
class IntRanges:
    """A set of non-negative ints as closed ranges; ``in`` and ``str`` work."""

    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and any(low <= value <= high for low, high in self.ranges)

    def __str__(self) -> str:
        return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.ranges)


@functools.lru_cache(maxsize=64)
def parse_steps(text: str, *, what: str = "steps") -> IntRanges:
    """Return the set that ``text`` names, such as "1", "1,2" or "1,3-7".

    Raises:
        ConfigError: a part is no number and no range, or a range runs backwards.
    """
    ranges = []
    for part in text.strip().strip("[]").split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f'{what} is {text!r}: {part.strip()!r} is no number or range; write e.g. "1,3-7"'
            )
        low = int(match.group(1))
        high = int(match.group(2) or low)
        if high < low:
            raise ConfigError(f"{what} is {text!r}: the range {part.strip()!r} runs backwards")
        ranges.append((low, high))
    return IntRanges(tuple(ranges))
