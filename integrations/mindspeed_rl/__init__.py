# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-RL: its flags and its rollout adapter."""
