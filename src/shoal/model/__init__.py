"""Loading, packed forward passes, logprobs and seeded sampling. A library without processes or messages.

sources, load, support     find a model by name, load it, check that it is supported
tree, turns, attention     a group as one packed forward pass
logprobs, sampling         logprobs of chosen tokens; drawing tokens by seed and checking draws
numerics, exact, products  the same bits in every batch and process
dtype, adapters, training  precision, LoRA, the scorer that the learner trains
"""
