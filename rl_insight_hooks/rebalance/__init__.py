# SPDX-License-Identifier: Apache-2.0
"""Expert placement: planner, bounds, score, map formats (pure numpy)."""
