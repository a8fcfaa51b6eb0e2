# SPDX-License-Identifier: Apache-2.0
"""Offline half: read recorded loads, judge and draw them."""
