"""Loading, packed forward passes, logprobs and seeded sampling. A library without processes, messages or network.

sources, load, support     a name becomes a folder, a model, and a way to compute it
tree, turns, attention     a group as one packed forward pass
logprobs, sampling         what is read from hidden states; seeded draws and their check
numerics, exact, products  the same bits in every batch and process
dtype, adapters, training  precision, LoRA, the scorer that the learner trains
"""
