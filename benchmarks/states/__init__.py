"""Every policy for parameters, gradients and states: what its plan foretells, beside what the run then took here."""
