# SPDX-License-Identifier: Apache-2.0
"""The load as one self-contained HTML page: ``data`` computes what is in it, ``write`` makes the file."""
