# SPDX-License-Identifier: Apache-2.0
"""Seams: the only files that name a third party."""
