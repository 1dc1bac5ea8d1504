"""Loading, packed forward passes, logprobs and seeded sampling. This library starts no process and sends no message.

sources, load, support     find a model by name, load it, check that it is supported
tree, turns, attention     a group as one packed forward pass
logprobs, sampling         logprobs of chosen tokens; drawing tokens by seed and checking draws
numerics, exact, products, activations  the same bits in every batch and process, on any number of threads
dtype, adapters, training  precision, LoRA, the scorer that the learner trains
"""
