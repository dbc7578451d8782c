"""forebay inside training frameworks: each file is a thin one over the framework's public API."""
