"""AdamW on the host: forebay's kernels beside torch's and DeepSpeed's, in parameters and bytes a second."""
