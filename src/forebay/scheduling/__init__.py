"""Decisions that the runtime takes while it runs and the lowering takes on paper: the same code for both. No torch.

order      what was used in which order, and so what comes next
slots      which block goes to which slot, what is evicted, what is fetched ahead
gradients  how many bytes of gradients may be on their way
staging    which buffer of a ring is taken next, and what its next writer waits for
"""
