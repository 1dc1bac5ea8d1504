"""Checks submissions. Only a validator can accept one.

service    the process: claims submissions, uploads verdicts       judge      opens and examines files
checks     one function for each lie                               case       a submission under examination
prefill    one forward of the claimed version                      verdict    what the coordinator and people are told
spending   what was used of the tolerance                          by_hand    `shoal audit FILE`
"""
