# SPDX-License-Identifier: Apache-2.0
"""Readers, one file per format."""
