"""Checks submissions. Only a validator can accept one.

service    the process: claims submissions, uploads verdicts       judge      opens and examines files
checks     one function for each lie                               case       a submission under examination
prefill    one forward pass of the claimed version                 verdict    the message to the coordinator
rounding   what honest machines' rounding explains               by_hand    `shoal audit FILE`
spending   how much of the checks' tolerance a submission used
"""
