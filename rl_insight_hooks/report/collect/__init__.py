# SPDX-License-Identifier: Apache-2.0
"""Bring node-local files together: over Ray or ssh, into one folder, or folded into one table.

``node`` runs on the nodes, ``plan`` decides (pure), ``gather`` runs both, ``ray_transport`` and
``ssh_transport`` speak to the nodes. See ``docs/commands/collect.md``.
"""
