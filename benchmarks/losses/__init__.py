"""Policies for states that change the numbers, held against exact runs: a loss curve on real text, and what the model
makes of text that it has not seen."""
