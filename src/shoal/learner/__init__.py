"""The trusted trainer: it turns batches of accepted groups into policy versions.

loop         the training loop                      groups       fetches and verifies a step's groups
batch        groups as rows of packed trees         updates      a step's updates; deals rows to the ranks
loss         the policy loss on tensors             policy       model, masters, optimizer, one update
masters      fp32 masters and LoRA adapters         ranks        the processes that train one policy
checkpoint   asynchronous checkpoints               report       metrics and the signed record of a step
sites        training across several sites          training     training without a pool: sft/ and pretrain/
"""
