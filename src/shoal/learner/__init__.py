"""The trusted trainer: batches of accepted groups in, policy versions out.

loop         the loop                               groups       a step's groups, fetched and verified again
batch        groups as rows of packed trees         updates      rows dealt to the ranks, one update after the other
loss         the policy loss on tensors             policy       model, masters, optimizer, one update
masters      fp32 masters and adapters              ranks        the processes that train together
checkpoint   what a restart continues from          report       metrics and the signed record of a step
sites        the learner at several sites           training     a training without a pool: sft/ and pretrain/
"""
