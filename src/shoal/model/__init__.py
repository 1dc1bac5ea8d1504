"""Loading, packed forward passes, logprobs and seeded sampling. A library without processes, messages or network."""
