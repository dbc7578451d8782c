"""``python -m forebay``: the same as the command ``forebay``."""

from __future__ import annotations

from forebay.cli.main import main

main()
