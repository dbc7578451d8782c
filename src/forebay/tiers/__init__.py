"""Where bytes live beside the device: exact-size host arenas and O_DIRECT files.

Nothing is re-exported here: ``tiers.host`` must stay importable without loading torch, and this file runs first.
"""
