"""Predicted against measured: what a plan says before a run, beside what the run then took."""
