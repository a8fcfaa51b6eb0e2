# SPDX-License-Identifier: Apache-2.0
"""verl: roles, steps and metrics."""
