# SPDX-License-Identifier: Apache-2.0
"""Errors that reach a user: each names the thing, the bad value and the fix, and knows its exit code."""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_THRESHOLD = 3
EXIT_INCOMPLETE = 4


class RlInsightError(ValueError):
    """Base of every error that this package raises on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILED


class ConfigError(RlInsightError):
    """A setting is unknown or has a bad value."""

    exit_code = EXIT_USAGE


class UsageError(RlInsightError):
    """A command line or an API call asks for something that cannot be done."""

    exit_code = EXIT_USAGE


class DataError(RlInsightError):
    """Input data is broken, or is not of the format that it claims to be."""


class IncompleteDataError(DataError):
    """Part of the data is missing or unreadable; the rest is usable."""

    exit_code = EXIT_INCOMPLETE


class ThresholdExceededError(RlInsightError):
    """A limit given with --fail-above was exceeded."""

    exit_code = EXIT_THRESHOLD


class DidNotInstall(RlInsightError):  # noqa: N818 - a statement, as in sentry-sdk's DidNotEnable
    """An integration that was asked for by name cannot be installed here."""


class MissingDependencyError(RlInsightError):
    """An optional package is needed; the message names the extra that brings it."""
