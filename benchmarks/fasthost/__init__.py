"""A fast host: the disk beside its raw speed, steps beside what cannot be hidden, DeepSpeed's ZeRO beside forebay."""
